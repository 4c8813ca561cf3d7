"""`genrl check --rows`: all rows of a run are prepared without its model, and those that would fail are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from genrl.config import RunConfig
    from genrl.data.prompts import Prompt
    from genrl.diffusion.config.schema import Config
    from genrl.vlm.config.schema import VLMConfig

LISTED = 20
Finding = tuple[str, str | None]
"""A row's name, and what is wrong with it."""


def rows_of(config: RunConfig) -> Iterator[Finding]:
    """Every row of the files and data sets of a run. Raises ValueError for a source that cannot be read at all."""
    if config.kind == "diffusion":
        yield from _prompts(cast("Config", config))
    elif config.kind == "vlm":
        yield from _questions(cast("VLMConfig", config))


def report(config: RunConfig) -> tuple[list[str], int]:
    """Lines for the user, and how many rows would fail."""
    from genrl_rewards.pictures import remarks

    rows, wrong = 0, list[str]()
    for name, problem in rows_of(config):
        rows += 1
        if problem is not None:
            wrong.append(problem if name in problem else f"{name}: {problem}")
    lines = [*wrong[:LISTED], *([f"... and {len(wrong) - LISTED} more"] if len(wrong) > LISTED else [])]
    counted = [f"{count} {kind}" for kind, count in remarks().items()]
    if counted:
        lines.append(f"pictures: {', '.join(counted)} (plain: of one single colour)")
    return [*lines, f"rows: {rows:,} read, {len(wrong):,} would fail"], len(wrong)


def _prompts(config: Config) -> Iterator[Finding]:
    from genrl.data.prompts import read
    from genrl.data.rows import PREFERENCE_COLUMNS

    image_columns = {*config.sampling.inputs.values(), *PREFERENCE_COLUMNS}
    for source in (config.prompts.train, config.prompts.eval):
        if source is None:
            continue
        parsed = read(source, config.prompts.column)
        yield from ((row.where, row.problem) for row in parsed.skipped)
        for row in parsed.rows:
            yield f"{source}:{row.line}", _pictures(row, image_columns, [*config.sampling.inputs.values()])


def _pictures(row: Prompt, known: set[str], needed: list[str]) -> str | None:
    """What is wrong with the first picture of a row that cannot be opened, or that is missing."""
    from genrl.data.rows import input_problem
    from genrl_rewards.pictures import open_picture

    for column in needed:
        if problem := input_problem(column, row.columns):
            return f"{problem} (sampling.inputs)"
    for column, value in row.columns.items():
        if (column in known or column.endswith("image")) and isinstance(value, str):
            try:
                open_picture(value)
            except ValueError as error:
                return f"{column}: {error}"
    return None


def _questions(config: VLMConfig) -> Iterator[Finding]:
    from genrl.vlm.policies.processor import open_image, without_clips
    from genrl.vlm.rollout.data import Questions

    task = config.task
    if task is None or config.environment is not None:
        return
    for split, source in (("train", task.train), ("eval", task.eval)):
        if task.name is not None or source is None:
            continue  # made, not read
        questions = Questions(config, "train" if split == "train" else "eval", counted=True)
        for number in range(len(questions)):
            row = questions.row(number)
            problem: str | None = row.prompt.broken or None
            try:
                for part in without_clips(row.prompt).parts if problem is None else ():
                    if not isinstance(part, str):
                        open_image(part, row.name)  # type: ignore[arg-type]
            except ValueError as error:
                problem = str(error)
            yield row.name, problem
