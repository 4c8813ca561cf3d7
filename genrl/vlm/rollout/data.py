"""Questions of a run: a generated task, a .jsonl file with pictures beside it, or a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from genrl.config.plugins import find
from genrl.config.vlm import VLMConfig
from genrl.config.vlm_names import OUTPUTS
from genrl.data.prompts import Prompt as Asked
from genrl.data.prompts import PromptError, open_data_set
from genrl.data.prompts import read as read_prompts
from genrl.mdp.noise import generator
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.rollout.rollout import order
from genrl.vlm.tasks import Generated
from genrl.vlm.tasks.rows import Row, Split
from rewards.given import given, is_given


class Questions:
    """Rows by number: `questions[k]`, drawn or read when they are asked for; `len(questions)` of them.

    kept: numbers of those that training asks, all unless `passes.leave_out` left some out.
    """

    def __init__(self, config: VLMConfig, split: Split) -> None:
        """Raises ValueError for data that cannot be read, or lacks a column."""
        task = config.task
        self.config, self.split, self.source = config, split, task.train if split == "train" else task.eval
        self.rows: Any = None
        self.sees: bool = find(config.vlm.output, OUTPUTS).sees
        self._easiest: list[int] | None = None
        if task.name is not None:
            self.generated = Generated(task.name, split)
            self.number = self.generated.number(task.rows if split == "train" else config.evaluation.questions)
            self.kept: Sequence[int] = range(self.number)
            return
        assert self.source is not None, "vlm_rules asks for it"
        if is_given(self.source):
            self.rows = given(self.source)
        elif Path(self.source).suffix in (".jsonl", ".txt"):
            try:
                self.rows = read_prompts(self.source, task.prompt).rows
            except PromptError as error:
                raise ValueError(f"task.{split}: {error}") from error
        else:
            self.rows = _data_set(self.source, task.prompt, task.image)
        self.number = len(self.rows) if split == "train" else min(len(self.rows), config.evaluation.questions)
        self.kept = range(self.number)

    def __len__(self) -> int:
        return self.number

    def asked(self, iteration: int, first: int, count: int) -> list[int]:
        """Numbers of questions first, first + 1 ... of a run; with a curriculum of the share of easy ones that the
        iteration takes its questions from, each of them equally often."""
        plan, seed = self.config.task.curriculum, self.config.seed
        if plan is None:
            return [self.kept[place] for place in order(len(self.kept), seed, first, count)]
        if self._easiest is None:
            self._easiest = sorted(self.kept, key=self._difficulty)
        share = min(1.0, plan.start + (1 - plan.start) * iteration / plan.over)
        pool = self._easiest[: max(count, math.ceil(share * len(self.kept)))]
        chosen = torch.randperm(len(pool), generator=generator(seed, "curriculum", first))[:count]
        return [pool[place] for place in chosen.tolist()]

    def _difficulty(self, number: int) -> float:
        assert self.config.task.curriculum is not None
        row, column = self[number], self.config.task.curriculum.column
        found = row.columns.get(column)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            have = ", ".join(row.columns)
            raise ValueError(
                f"{row.name}: the column {column!r} is to say how hard the question is (task.curriculum.column), and "
                f"holds {found!r}; it must be a number. Columns: {have}"
            )
        return float(found)

    def __getitem__(self, number: int) -> Row:
        """Raises ValueError naming file and row where there is no picture."""
        task = self.config.task
        if task.name is not None:
            found = self.generated[number]
            prompt = Prompt(found.prompt.parts, system=task.system, where=found.name)
            return Row(found.name, prompt, found.columns)
        one, where = self.rows[number], f"{self.source}:{number + 1}"
        if not isinstance(one, Asked):  # of a data set or a script
            columns = {key: value for key, value in one.items() if key not in (task.image, task.prompt)}
            pictures, text = one.get(task.image) if task.image else None, one[task.prompt]
        else:
            where = f"{self.source}:{one.line}"
            columns = {key: value for key, value in one.columns.items() if key != task.image}
            pictures, text = one.columns.get(str(task.image)), one.text
        if not self.sees or task.image is None:  # what is asked for is made, not looked at
            return Row(where, Prompt((text,), system=task.system, where=where), columns)
        several = pictures if isinstance(pictures, list) else [pictures]
        if not several or any(picture is None for picture in several):
            raise ValueError(f"{where}: there is no picture in the column {task.image!r}")
        parts = [self._picture(picture, where) for picture in several]
        return Row(where, Prompt((*parts, text), system=task.system, where=where), columns)

    def _picture(self, picture: Any, where: str) -> Image.Image | Path:
        if isinstance(picture, Image.Image):
            return picture
        if isinstance(picture, str):
            return Path(str(self.source)).parent / picture
        kind = type(picture).__name__
        raise ValueError(
            f"{where}: the column {self.config.task.image!r} holds a {kind}; it must be a picture or a file"
        )


def _data_set(source: str, prompt: str, image: str | None) -> Any:
    """A data set (`open_data_set`). Raises ValueError where it cannot be loaded, or lacks a column."""
    rows = open_data_set(source)
    missing = [column for column in (prompt, image) if column is not None and column not in rows.column_names]
    if missing:
        raise ValueError(
            f"{source}: no column {missing[0]!r}; it has {', '.join(rows.column_names)}. Name them by task.prompt and "
            "task.image"
        )
    return rows
