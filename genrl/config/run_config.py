"""The base class of the configurations of all kinds of runs: what shared code reads of a run, whatever its kind."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from genrl.config.errors import (
    ConfigError,
    Finding,
    ImpossibleConfig,
    Origins,
    Problem,
    command,
    dotted,
    origin_of,
    with_places,
)
from genrl.config.method import Kind, Method
from genrl.config.section import Count, Flag, Section, Text, Whole
from genrl.config.sections import EMA, Checkpoint, Distributed, EvaluationBase, Optimizer, Tracker
from genrl.config.yaml_source import KeyPath

FileFinding = tuple[KeyPath, str]
"""A key, and what is wrong with the file that it names."""


class RunConfig(Section):
    """One training run. The class of a kind adds its sections and says which methods its `trainer` may be."""

    kind: ClassVar[Kind]
    library: ClassVar[str] = "transformers"
    """What reads the trained model, for its card on the hub."""

    trainer: Method
    """Which algorithm, and its settings."""
    optimizer: Optimizer = Optimizer()
    """The optimiser and its schedule."""
    ema: EMA | None = None
    """Moving average of the trained weights, for evaluation and the result; null = none."""
    evaluation: EvaluationBase = EvaluationBase()
    """When and how the model is judged."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    distributed: Distributed = Distributed()
    """Several processes."""
    tf32: Flag | None = None
    """On a GPU, round what float32 matrix products and convolutions read to TF32 (docs/speed.md): faster, 10 bits of
    mantissa instead of 23; null = as torch has it, which rounds in convolutions alone."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Where metrics go besides the run folder's metrics.jsonl: names of accelerate's trackers."""
    iterations: Count = 200
    """Rounds of sampling and training."""
    idle_iterations: Count | None = 5
    """Stop the run, with the reason, after so many iterations in a row that change no weight; null = never."""
    seed: Whole = 0
    """Seed of everything random: data, noise, new weights."""
    output: Text = "runs/genrl"
    """Run folder; default runs/<name of the YAML file>, with its folders below `configs`."""

    @property
    def base(self) -> str | None:
        """Folder or hub id of the model that is trained; None for one made anew."""
        raise NotImplementedError

    @property
    def rounds_weights(self) -> bool:
        """Whether weights that are trained are rounded where they are no shards."""
        return False

    @property
    def trains_shards(self) -> bool:
        """Whether what is trained is in shards."""
        raise NotImplementedError

    @property
    def together(self) -> int:
        """Processes that compute each sample together."""
        return 1

    @property
    def watchable(self) -> tuple[str, ...]:
        """The held-out figures that `evaluation.monitor` may watch."""
        return ("success",)

    @property
    def age(self) -> tuple[str, int]:
        """The key that says by how many iterations samples may be older than the weights, and what it says."""
        raise NotImplementedError

    @classmethod
    def completed(cls, written: Any) -> Any:
        """What a file says, with what is left out because another key implies it."""
        return written

    @classmethod
    def in_order(cls) -> list[str]:
        """The names of the sections and keys, a kind's own first: in the order in which they are shown and saved."""
        return sorted(cls.model_fields, key=lambda key: key in RunConfig.model_fields)

    def problems(self) -> Iterator[Finding]:
        """Settings that cannot work together. Looks at values only; what needs the disk is in `file_problems`."""
        sharded_by = "distributed.fsdp" if self.distributed.fsdp else "model.offload.denoiser"
        yield from self.optimizer.problems(sharded_by if self.trains_shards else None)
        yield from self._monitor_problems()
        at, age = self.age
        if age >= self.iterations:
            text = f"samples of all {self.iterations} iterations would be of the first weights; write less"
            yield (at, "iterations"), text

    def _monitor_problems(self) -> Iterator[Finding]:
        """Why the monitor cannot watch: no such figure is evaluated, or too seldom."""
        monitor, every, at = self.evaluation.monitor, self.evaluation.every, "evaluation.monitor"
        if monitor is None:
            return
        if monitor.reward not in self.watchable:
            hint = get_close_matches(monitor.reward, self.watchable, n=1, cutoff=0.5)
            meant = f"did you mean {hint[0]!r}? " if hint else ""
            text = f"no held-out figure is called {monitor.reward!r}; {meant}they are: {', '.join(self.watchable)}"
            yield (f"{at}.reward",), text
        if every == 0:
            yield (
                (at, "evaluation.every"),
                "nothing is evaluated, so nothing can be watched; evaluate every 20 iterations",
            )

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """What is wrong with the files that this kind of run names; remarks that stop nothing are put into `notes`."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if problems := list(self.problems()):
            raise ImpossibleConfig(problems)
        return self


def _no_room(output: Path) -> str | None:
    """Why a run's folder cannot be made; None where it can, or is there."""
    above = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not above.is_dir():
        return f"{above} is a file; name a folder"
    if above != output and not os.access(above, os.W_OK | os.X_OK):
        return f"no folder can be made in {above}; name another"
    return None


def check_files(config: RunConfig, origins: Origins | None = None) -> list[str]:
    """Check what can be checked without loading weights; returns remarks that stop nothing, one line each.

    `origins` (from `load_located`) gives the messages their file and line. ConfigError lists all problems.
    """
    notes: list[str] = []
    wrong = list(config.file_problems(notes))
    for index, name in enumerate(config.trackers):
        if importlib.util.find_spec(name) is None:
            text = f"the package {name} is not installed: pip install {name.replace('_', '-')}, or take it out"
            wrong.append((("trackers", index), text))
    if why := config.optimizer.missing_package():
        wrong.append((("optimizer", "name"), why))
    if why := _no_room(Path(config.output)):
        wrong.append((("output",), why))
    if wrong:
        at = [(origin_of(path, origins or {}), dotted(path), text) for path, text in wrong]
        raise ConfigError([Problem(origin, key, with_places(text, origin)) for origin, key, text in at])
    output = Path(config.output)
    if output.is_dir() and any(output.iterdir()):
        notes.append(f"output: {output} is in use; continue it by `{command('resume', output)}`, or choose another")
    return notes
