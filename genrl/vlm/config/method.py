"""What a method for vision-language models declares of itself. Subclass `VLMMethod` for one of your own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from genrl.config.method import Kind, Method, built_in, class_of
from genrl.config.section import Flag

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig

QUESTIONS, EPISODES = "answers", "episodes"
"""The methods of runs that name none: with questions, with an environment."""

PLACE = re.compile(r"{(\w+)}")
"""Of a column in a text."""

Row = tuple[str, str, str]
"""What there is of in an iteration, how many, and a remark."""


class VLMMethod(Method):
    """Base of the settings of methods for vision-language models. Shared code asks its members, never its type."""

    kind: ClassVar[Kind] = "vlm"
    acts: ClassVar[bool] = False
    """It learns from episodes in `environment`; otherwise from answers to the questions of `task`."""

    with_heads: ClassVar[bool] = False
    """It trains modules beside the model, those that `heads(policy)` of its train.py makes, by name."""

    takes_older_samples: ClassVar[bool] = False
    """Whether answers may have been drawn by the weights of earlier iterations (`generation.staleness`)."""

    takes_part_of_groups: ClassVar[bool] = False
    """Whether it can be trained on some of the answers of each group, as on all (`economy.keep`)."""

    fit_batch: Flag = False
    """Where memory runs out in training, do the iteration again with half the micro_batch."""

    @property
    def name(self) -> str:
        """What it is called where people read it."""
        return self.algorithm

    @property
    def reference(self) -> bool:
        """Whether it reads the model as it was before training. Without LoRA that is a second copy in memory."""
        return False

    @property
    def average(self) -> tuple[float, int] | None:
        """A moving average of the weights that it reads: the share that an update keeps, and optimiser steps between
        updates."""
        return None

    @property
    def task_column(self) -> str | None:
        """The column that names a question's task, where it compares the answers of a task with each other."""
        return None

    @property
    def greedy(self) -> bool:
        """Whether it reads the reward of the most probable answer to each question, which is sampled in addition."""
        return False

    @property
    def bounds(self) -> bool:
        """Whether samples of a bound stand for the log-probabilities of tokens (masked diffusion models)."""
        return False

    @property
    def group_filter(self) -> Literal["none", "spread", "not_all_right"]:
        """Which groups of answers are trained on: all, those with two different rewards, or all but those whose first
        reward is always 1."""
        return "none"

    @property
    def rows_per_pass(self) -> int | None:
        """Answers per pass of the model in training; None = all of an update."""
        return None

    @property
    def rounds(self) -> int:
        """Most rounds of sampling in an iteration, while the filter leaves too few groups."""
        return 1

    @property
    def taught(self) -> str | None:
        """The answers that it is taught: a column, or a text with columns in braces. None = the model's own."""
        return None

    @property
    def samples(self) -> bool:
        """Whether it learns from answers that the model samples, which rewards score."""
        return self.taught is None

    @property
    def demonstrations(self) -> tuple[str, str] | None:
        """Answers of the data that it reads, taught or beside the model's own: the key that names them, and which."""
        return None if self.taught is None else ("trainer.target", self.taught)

    def recipe(self, config: VLMConfig) -> Any:
        """The functions that its loss is made of, a dataclass, where it is made of named functions."""
        return None

    def shared(self, config: VLMConfig) -> tuple[str, int]:
        """A key, and the number that is shared out evenly to the processes."""
        return "generation.prompts_per_iteration", config.generation.prompts_per_iteration

    def at_least(self, config: VLMConfig) -> tuple[str, int] | None:
        """A key, and a number of which every process needs one, in whatever way they are shared out."""
        return None

    def sampled(self, config: VLMConfig) -> tuple[str, int, str]:
        """What an iteration samples, how many, and how they are made up."""
        starts, size = config.generation.prompts_per_iteration, config.generation.group_size
        return "answers", starts * size, f"{starts} questions x {size}"

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        """What an iteration does, as `genrl check` shows it."""
        (what, number, remark), tokens = self.sampled(config), config.generation.max_new_tokens
        yield what, f"{number:,}", remark
        yield "tokens", f"{number * tokens:,} at most", f"{tokens} of each"

    @classmethod
    def completed(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its section as it is written, with what is left out because another key implies it."""
        return written


def columns_of(target: str) -> list[str]:
    """The columns of an answer that is taught (`VLMMethod.taught`)."""
    return PLACE.findall(target) if "{" in target else [target]


def default_method() -> VLMMethod:
    """That of a run which names none."""
    return cast(VLMMethod, built_in("vlm")[QUESTIONS](algorithm=QUESTIONS))


def completed(written: Any) -> Any:
    """A configuration as it is written, with the names of its method and of its stages', and what they leave out.
    Without `algorithm` a method is the one that `preset` names, or that of the run's kind."""
    found = _completed(written)
    stages = found.get("stages") if isinstance(found, Mapping) else None
    if not isinstance(stages, list | tuple):
        return found
    own = [_completed(one) if isinstance(one, Mapping) and one.get("trainer") is not None else one for one in stages]
    return {**found, "stages": own}


def _completed(written: Any) -> Any:
    """A section with a section `trainer`: a configuration, or a stage."""
    if not isinstance(written, Mapping):
        return written
    trainer = {} if written.get("trainer") is None else written["trainer"]
    if not isinstance(trainer, Mapping):
        return written
    known, preset = built_in("vlm"), trainer.get("preset")
    if "algorithm" not in trainer:
        named = isinstance(preset, str) and preset in known  # a preset that has become a method of its own
        usual = QUESTIONS if written.get("environment") is None else EPISODES
        rest = {key: value for key, value in trainer.items() if not (named and key == "preset")}
        trainer = {"algorithm": preset if named else usual, **rest}
    try:
        method = class_of(trainer["algorithm"], "vlm")
    except (TypeError, ValueError):  # told where it is validated
        return {**written, "trainer": trainer}
    return {**written, "trainer": cast(type[VLMMethod], method).completed(trainer)}
