"""The configuration of a run that trains a vision-language model, and what its method declares of itself.

The two refer to each other: a run has a method, and a method is asked about a run. The sections are in `sections`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from genrl.config.errors import Finding, ImpossibleConfig
from genrl.config.method import ByName, Method, built_in_names, class_of
from genrl.config.run_config import FileFinding, RunConfig
from genrl.config.section import AnyOf, Count, Flag, Section
from genrl.config.sections import Economy, labels_of
from genrl.vlm.config.sections import (
    VLM,
    Augmentation,
    Environment,
    Generation,
    Rescue,
    Synthesis,
    Task,
    VLMEvaluation,
    VLMOptimizer,
    VLMReward,
)

QUESTIONS, EPISODES = "answers", "episodes"
"""The methods of runs that name none: with questions, with an environment."""

RATE = ("lr", "schedule", "warmup_steps")
"""What a stage may say of the optimiser."""

PLACE = re.compile(r"{(\w+)}")
"""Of a column in a text."""

Row = tuple[str, str, str]
"""What there is of in an iteration, how many, and a remark."""


class GroupFilter(NamedTuple):
    """Which groups of answers are trained on."""

    rule: Literal["none", "spread", "not_all_right"] = "none"
    """All, those with two different rewards, or all but those whose first reward is always 1."""
    rounds: int = 1
    """Most rounds of sampling in an iteration, while the rule leaves too few groups."""


class Shared(NamedTuple):
    """What processes share out."""

    key: str
    number: int
    """This number is shared out evenly."""
    at_least: tuple[str, int] | None = None
    """A key, and a number of which every process needs one, in whatever way they are shared out."""


class VLMMethod(Method):
    """Base of the settings of methods for vision-language models. Shared code asks its members, never its type."""

    kind = "vlm"
    learns_from: ClassVar[Literal["answers", "episodes", "data"]] = "answers"
    """Answers to the questions of `task` that the model samples and rewards score; episodes in `environment`; or what
    the data gives."""

    fit_batch: Flag = False
    """Where memory runs out in training, do the iteration again with half the micro_batch."""

    @property
    def name(self) -> str:
        """What it is called where people read it."""
        return self.algorithm

    @property
    def reads(self) -> frozenset[str]:
        """What it reads beside rewards and log-probabilities (`recipe.choice.Choice.tensors`) and is made for it: ref,
        of the model before training, without LoRA a second copy in memory; ema, of a moving average of the weights;
        greedy, the reward of the most probable answer to each question, which is sampled in addition; bound: samples of
        a bound stand for the log-probabilities of tokens (masked diffusion models); task: the column of its recipe's
        advantage, which names a question's task; heads: modules trained beside the model, those that `heads(policy)` of
        its train.py makes, by name."""
        return frozenset()

    @property
    def group_filter(self) -> GroupFilter:
        """Which groups of answers are trained on."""
        return GroupFilter()

    @property
    def rows_per_pass(self) -> int | None:
        """Answers per pass of the model in training; None = all of an update."""
        return None

    @property
    def demonstrations(self) -> tuple[str, str] | None:
        """Answers of the data that it reads, taught instead of the model's own or beside them: the key that names them,
        and which: a column, or a text with columns in braces."""
        return None

    def recipe(self, config: VLMConfig) -> Any:
        """The functions that its loss is made of, a dataclass, where it is made of named functions."""
        return None

    def shared(self, config: VLMConfig) -> Shared:
        """What processes share out."""
        return Shared("generation.prompts_per_iteration", config.generation.prompts_per_iteration)

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        """What an iteration does, as `genrl check` shows it."""
        starts, size = config.generation.prompts_per_iteration, config.generation.group_size
        yield from sampled(config, "answers", starts * size, f"{starts} questions x {size}")

    @classmethod
    def completed(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the method's section as it is written, with what is left out because another key implies it."""
        return written


def sampled(config: VLMConfig, what: str, number: int, remark: str) -> Iterator[Row]:
    """Rows of so many things that an iteration samples, and of their tokens."""
    tokens = config.generation.max_new_tokens
    yield what, f"{number:,}", remark
    yield "tokens", f"{number * tokens:,} at most", f"{tokens} of each"


def columns_of(target: str) -> list[str]:
    """The columns of an answer that the data gives (`VLMMethod.demonstrations`)."""
    return PLACE.findall(target) if "{" in target else [target]


def default_method() -> VLMMethod:
    """The method of a run that names none."""
    return cast(VLMMethod, class_of(QUESTIONS, "vlm")(algorithm=QUESTIONS))


def completed(written: Any) -> Any:
    """A configuration as it is written, with the name of its method and what that leaves out. Without `algorithm` a
    method is the one that `preset` names, or that of the run's kind."""
    if not isinstance(written, Mapping):
        return written
    trainer = {} if written.get("trainer") is None else written["trainer"]
    if not isinstance(trainer, Mapping):
        return written
    algorithms, preset = built_in_names("vlm"), trainer.get("preset")
    if "algorithm" not in trainer:
        named = isinstance(preset, str) and preset in algorithms  # a preset that has become a method of its own
        # most files name a preset alone; what it learns from is where the run asks or acts
        usual = QUESTIONS if written.get("environment") is None else EPISODES
        others = {key: value for key, value in trainer.items() if not (named and key == "preset")}
        trainer = {"algorithm": preset if named else usual, **others}
    try:
        method = class_of(trainer["algorithm"], "vlm")
    except (TypeError, ValueError):  # told where it is validated
        return {**written, "trainer": trainer}
    return {**written, "trainer": cast(type[VLMMethod], method).completed(trainer)}


def _merged(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` on top of `base`, as a file on top of its `include`."""
    if new.get("algorithm", base.get("algorithm")) != base.get("algorithm"):
        return dict(new)  # keys of one method mean nothing to another
    both = {key for key in new if isinstance(new[key], Mapping) and isinstance(base.get(key), Mapping)}
    return {**base, **new, **{key: _merged(base[key], new[key]) for key in both}}


Trainer = Annotated[VLMMethod, ByName(), SerializeAsAny(), AnyOf()]


class Stage(Section):
    """A part of a run: its length, and what differs from the run's own sections. Keys are merged with those of the run
    as a file's are with its `include`; a trainer of another algorithm stands in place of the run's."""

    iterations: Count
    """How many of the run's iterations."""
    task: dict[str, Any] = {}
    """Keys of `task`: its training questions. The evaluation uses those of the run."""
    trainer: dict[str, Any] = {}
    """Keys of `trainer`: its method."""
    optimizer: dict[str, Any] = {}
    """lr, schedule and warmup_steps over its own iterations; the optimiser then begins anew. {} = optimiser and
    schedule of the run go on."""


class VLMConfig(RunConfig):
    """One training run of a vision-language model."""

    kind = "vlm"

    vlm: VLM
    """Which model is trained."""
    task: Task = Task()
    """The questions."""
    environment: Environment | None = None
    """Instead of a task: where the model acts, in several turns."""
    generation: Generation = Generation()
    """How answers are sampled."""
    economy: Economy = Economy()
    """Which answers to a question are trained on."""
    rewards: tuple[VLMReward, ...] = ()
    """Rewards for answers; the first one decides which answers are right in evaluation. An environment has its own."""
    trainer: Trainer = Field(default_factory=default_method)
    """The method; null = groups of answers by grpo, or of episodes if there is an environment."""
    stages: tuple[Stage, ...] = ()
    """Parts of the run one after the other (LMM-R1), whose iterations add up to `iterations`; [] = one."""
    augmentation: Augmentation | None = None
    """Questions changed by their difficulty (Reg-GRPO); null = asked as they are."""
    rescue: Rescue | None = None
    """Help with questions that no answer is right to; null = they teach nothing."""
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
        number = min(bisect_right(self.ends, iteration), max(0, len(self.stages) - 1))
        return number, self.parts[number]

    @property
    def rounds_weights(self) -> bool:
        """Whether weights that are trained are rounded where they are no shards."""
        return self.vlm.lora is None and self.vlm.dtype != "float32"

    @property
    def trains_shards(self) -> bool:
        """Whether what is trained is in shards."""
        return bool(self.distributed.fsdp) and self.vlm.lora is None

    @property
    def ends(self) -> tuple[int, ...]:
        """Numbers of iterations after which a stage is over; without stages, none."""
        return tuple(accumulate(stage.iterations for stage in self.stages))

    @property
    def parts(self) -> list[VLMConfig]:
        """The run as each of its stages has it; without stages, itself."""
        return self.staged or [self]

    @cached_property
    def staged(self) -> list[VLMConfig]:
        """`parts` of a run in stages, of any other none."""
        return [type(self).model_validate(self._written(stage)) for stage in self.stages]

    def _written(self, stage: Stage) -> dict[str, Any]:
        """What a file of a stage alone would say, with the length of the run."""
        # the run as it is, not as it was written: a script may have handed over sections
        return _merged(self.model_dump(exclude={"stages"}), stage.model_dump(exclude={"iterations"}))

    def with_micro_batch(self, rows: int) -> VLMConfig:
        """The run with passes of so many rows."""

        def smaller(part: VLMConfig) -> VLMConfig:
            return part.model_copy(update={"trainer": part.trainer.model_copy(update={"micro_batch": rows})})

        changed = smaller(self)
        # where pydantic keeps it; a copy would hold the old ones
        changed.__dict__["staged"] = [smaller(part) for part in self.staged]
        return changed

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
        """What a file says, with the name of its method and what that leaves out."""
        return completed(written)

    def problems(self) -> Iterator[Finding]:
        """Settings that cannot work together. A run in stages is what each of them makes of it."""
        from genrl.vlm.config.rules import problems

        if refused := list(dict.fromkeys(self._refused_stages())):
            yield from refused
            return
        yield from problems(self)
        yield from self.trainer.problems(self)
        yield from super().problems()

    def _refused_stages(self) -> Iterator[Finding]:
        """What is wrong with the run as a stage has it, under the stage's name where the stage says so."""
        from genrl.config.messages import explain

        for number, stage in enumerate(self.stages):
            at, written = f"stages.{number}", self._written(stage)
            if others := [key for key in stage.optimizer if key not in RATE]:
                text = f"the optimiser is that of the run; a stage may have its own {', '.join(RATE)}"
                yield (f"{at}.optimizer.{others[0]}",), text
                continue
            try:
                part = type(self).model_validate(written)
            except ValidationError as error:
                # rules are asked once all keys are right, so there is either one such error or only others
                cause = error.errors()[0].get("ctx", {}).get("error")
                findings = [((problem.path,), problem.text) for problem in explain(error, written, {})]
                for keys, text in cause.problems if isinstance(cause, ImpossibleConfig) else findings:
                    changed = [key for key in ("task", "trainer", "optimizer") if getattr(stage, key)]
                    yield tuple(f"{at}.{key}" if key.split(".")[0] in changed else key for key in keys), text
                continue
            if "heads" in part.trainer.reads:
                text = f"{part.trainer.name} trains modules beside the model; start a run from this one's model"
                yield (f"{at}.trainer.algorithm",), text

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """What is wrong with the model's folder, the data and the rewards."""
        from genrl.vlm.config.files import file_problems

        return file_problems(self, notes)
