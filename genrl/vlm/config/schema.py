"""The configuration of a run that trains a vision-language model, and what its method declares of itself.

The two refer to each other: a run has a method, and a method is asked about a run. The sections are in `sections`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, SerializeAsAny, model_validator

from genrl.config.economy import Economy
from genrl.config.errors import Finding
from genrl.config.kinds import Kind
from genrl.config.method import ByName, Method, built_in_names, class_of
from genrl.config.run_config import FileFinding, RunConfig
from genrl.config.section import AnyOf, Count, Flag, Positive, Section, Text, Whole
from genrl.config.sections import labels_of
from genrl.vlm.config.environment import Environment
from genrl.vlm.config.sections import (
    VLM,
    Augmentation,
    Generation,
    Synthesis,
    Task,
    VLMEvaluation,
    VLMOptimizer,
    VLMReward,
)

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
    return cast(VLMMethod, class_of(QUESTIONS, "vlm")(algorithm=QUESTIONS))


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
    known, preset = built_in_names("vlm"), trainer.get("preset")
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


Trainer = Annotated[VLMMethod, ByName(), SerializeAsAny(), AnyOf()]


class StageOptimizer(Section):
    """The learning rate of a stage, over its own iterations; the other keys are those of the run's optimizer."""

    lr: Positive = 1e-6
    """Learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to 0 at the end of the stage."""
    warmup_steps: Whole = 0
    """Optimiser steps in which the learning rate rises from 0."""


class Stage(Section):
    """A part of a run with questions or a method of its own."""

    iterations: Count
    """How many of the run's iterations."""
    task: Task | None = None
    """Its training questions; null = those of the run. The evaluation uses those of the run."""
    trainer: Trainer | None = None
    """Its method with all its keys, in place of the run's `trainer`; null = that of the run."""
    preset: Text | None = None
    """Its method, in place of `trainer.preset`; null = that of the run. The other keys of `trainer` stay."""
    optimizer: StageOptimizer | None = None
    """Its learning rate; the optimiser then begins anew. null = optimiser and schedule of the run go on."""


class VLMConfig(RunConfig):
    """One training run of a vision-language model."""

    kind: ClassVar[Kind] = "vlm"

    vlm: VLM
    """Which model is trained."""
    task: Task = Task()
    """The questions."""
    environment: Environment | None = None
    """Instead of a task: where the model acts, in several turns."""
    generation: Generation = Generation()
    """How answers are sampled."""
    economy: Economy = Economy()
    """Which questions are asked, and which of their answers are trained on."""
    rewards: tuple[VLMReward, ...] = ()
    """Rewards for answers; the first one decides which answers are right in evaluation. An environment has its own."""
    trainer: Trainer = Field(default_factory=default_method)
    """The method; null = groups of answers by grpo, or of episodes if there is an environment."""
    stages: tuple[Stage, ...] = ()
    """Parts of the run one after the other (LMM-R1), whose iterations add up to `iterations`; [] = one."""
    augmentation: Augmentation | None = None
    """Questions changed by their difficulty (Reg-GRPO); null = asked as they are."""
    synthesis: Synthesis | None = None
    """New pictures during the run (Syn-GRPO); null = none."""
    optimizer: VLMOptimizer = VLMOptimizer()
    """The optimiser and its schedule."""
    evaluation: VLMEvaluation = VLMEvaluation()
    """When and how the model is judged."""

    @property
    def base(self) -> str:
        """Folder or hub id of the model."""
        return self.vlm.path

    @property
    def reward_labels(self) -> tuple[str, ...]:
        """A short, unique name for each reward, in their order."""
        return labels_of([reward.name for reward in self.rewards])

    def at(self, iteration: int) -> tuple[int, VLMConfig]:
        """The number of the stage that an iteration belongs to, and the run as this stage has it."""
        last = 0
        for number, stage in enumerate(self.stages):
            last += stage.iterations
            if iteration < last or number == len(self.stages) - 1:
                preset = {} if stage.preset is None else {"preset": stage.preset}
                rate = {} if stage.optimizer is None else dict(stage.optimizer)
                own = {
                    "task": stage.task or self.task,
                    "trainer": stage.trainer or self.trainer.model_copy(update=preset),
                    "optimizer": self.optimizer.model_copy(update=rate),
                }
                return number, self.model_copy(update=own)
        return 0, self

    @property
    def rounds_weights(self) -> bool:
        """Whether weights that are trained are rounded where they are no shards."""
        return self.vlm.lora is None and self.vlm.dtype != "float32"

    @property
    def trains_shards(self) -> bool:
        """Whether what is trained is in shards."""
        return self.distributed.fsdp and self.vlm.lora is None

    @property
    def ends(self) -> tuple[int, ...]:
        """Numbers of iterations after which a stage is over; without stages, none."""
        return tuple(accumulate(stage.iterations for stage in self.stages))

    @property
    def parts(self) -> list[VLMConfig]:
        """The run as each of its stages has it; without stages, itself."""
        return [self.at(start)[1] for start in (0, *self.ends[:-1])]

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any) -> Any:
        return completed(written)

    @property
    def watchable(self) -> tuple[str, ...]:
        """Rewards and the share of right answers, or the success of episodes."""
        return (*self.reward_labels, "accuracy") if self.environment is None else ("success",)

    @property
    def age(self) -> tuple[str, int]:
        """The key that says how old samples may be, and what it says."""
        return "generation.staleness", self.generation.staleness

    @classmethod
    def completed(cls, written: Any) -> Any:
        """What a file says, with the names of its method and of its stages', and what they leave out."""
        return completed(written)

    def problems(self) -> Iterator[Finding]:
        """Settings that cannot work together."""
        from genrl.vlm.config.rules import problems

        yield from problems(self)
        if not (self.stages and all(stage.trainer for stage in self.stages)):
            yield from self.trainer.problems(self)
        yield from super().problems()

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """What is wrong with the model's folder, the data and the rewards."""
        from genrl.vlm.config.files import file_problems

        return file_problems(self, notes)
