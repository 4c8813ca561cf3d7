"""A run folder as it grows: metrics by key, read on from where the last look ended, with their configuration.

A run of 20,000 rows is read once, in about a second; a look at it afterwards costs what was written since.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genrl.config.yaml_source import MAX_BYTES, read
from genrl.runtime.folder.run import Run, read_row, run_info
from genrl.runtime.show.curves import Point, is_constant


@dataclass
class Column:
    """All values of one metric by rising step; NaN where a row has it without a value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    missing: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, step: int, value: object) -> None:
        number = float(value) if isinstance(value, (int, float)) else math.nan
        number = number if math.isfinite(number) else math.nan
        self.steps.append(step)
        self.values.append(number)
        if math.isnan(number):
            self.missing += 1
        else:
            self.low, self.high = min(self.low, number), max(self.high, number)

    def points(self) -> list[Point]:
        """For `curves.chart`."""
        return [(s, None if math.isnan(v) else v) for s, v in zip(self.steps, self.values, strict=True)]

    def known(self) -> list[tuple[int, float]]:
        """(step, value) of the rows with a value."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if not math.isnan(v)]

    @property
    def last(self) -> float | None:
        """The newest value; None where there is none."""
        return next((value for value in reversed(self.values) if not math.isnan(value)), None)

    @property
    def is_constant(self) -> bool:
        """Equal everywhere, up to rounding, and never without a value."""
        return not self.missing and is_constant([self.low, self.high])


class Followed:
    """One run, or the folder in which one will begin."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """name: shown for it; default the folder's."""
        self.run, self.name = Run(folder), name or folder.resolve().name
        self.config = ""
        self.settings: Mapping[str, Any] = {}
        self.info: Mapping[str, Any] = {}
        self.problem = ""
        """What of the folder cannot be read, for the reader; empty where all can."""
        self._forget()

    def _forget(self) -> None:
        self.columns: dict[str, Column] = {}
        self.rows = 0
        self.done = 0
        """Finished iterations, of the last row."""
        self._file, self._offset = 0, 0

    @property
    def exists(self) -> bool:
        return self.run.config.is_file() or self.run.metrics.is_file()

    @property
    def planned(self) -> int | None:
        """Iterations of the whole run; None where the configuration does not tell."""
        iterations = self.settings.get("iterations")
        return iterations if isinstance(iterations, int) else None

    def look(self) -> None:
        """Read what was written since the last look. What cannot be read is told by `problem`."""
        self.problem = ""
        self.read_info()
        try:
            self.read_config()
            self._read_on()
        except (OSError, ValueError) as error:
            self.problem = str(error)

    def read_info(self) -> None:
        """What run.json tells; nothing where it cannot be read."""
        self.info = run_info(self.run)

    def read_config(self) -> None:
        """Raises ValueError where config.yaml is no YAML, or larger than a configuration can be."""
        text = ""
        if self.run.config.is_file():
            with self.run.config.open(encoding="utf-8") as file:
                text = file.read(MAX_BYTES + 1)
        if text != self.config:
            values = read(self.run.config).value if text else {}
            self.config, self.settings = text, values if isinstance(values, dict) else {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of metrics.jsonl, in its order."""
        for row in rows:
            self.rows, self.done = self.rows + 1, row["step"]
            for key, value in row.items():
                if key != "step":
                    self.columns.setdefault(key, Column()).add(row["step"], value)

    def _read_on(self) -> None:
        """The complete lines after the last ones read; all of them where a resumed run has written the file anew."""
        path = self.run.metrics
        if not path.is_file():
            return self._forget()
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file or stat.st_size < self._offset:
                self._forget()
                self._file = stat.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.add([read_row(line, path, self.rows + 1)])
                self._offset += len(line)
