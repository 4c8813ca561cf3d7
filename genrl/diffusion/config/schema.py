"""The configuration of a run that trains a diffusion pipeline, and what its method declares of itself beside its keys.

The two refer to each other: a run has a method, and a method is asked about a run. The sections are in `sections`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, SerializeAsAny

from genrl.config.errors import Finding
from genrl.config.method import CALLED, ByName, Method
from genrl.config.run_config import FileFinding, RunConfig
from genrl.config.section import Count, Flag
from genrl.config.sections import EMA, Economy, labels_of
from genrl.diffusion.config.sections import Engine, Evaluation, Kernels, Model, Processes, Prompts, Reward, Sampling
from genrl.mdp.plan import describe, make_plan

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt, PromptRows

AdvantageScale = Literal["group", "global", "none"]
GuidanceInTraining = Flag | Literal["detached"]

Refusable = Literal["distributed.context", "sampling.buckets", "float16"]

Guided = Callable[[float | None], int]
"""Model calls of a step under a guidance scale, 1 or 2; None is the pipeline's default."""


class Calls(NamedTuple):
    """Model calls of one iteration, the mean over all; a guided step counts two."""

    sample: float
    train: float
    """Forward calls in training, those without gradient included."""
    backward: float
    """Calls that a gradient runs through."""
    trained: float
    """Denoising steps, or noise levels, trained per sample."""
    ends: float = 1.0
    """States that sampling ends with, for each sample: candidates count."""
    evaluated: int = 1
    """Pictures that an evaluation draws of each prompt."""
    kept: float = 0.0
    """Micro-batches whose graphs of sampling are kept for training at once, in the iteration that keeps most, by one
    process; 0 = none are."""


class DiffusionMethod(Method):
    """Base of the settings of methods that train a diffusion pipeline."""

    kind = "diffusion"

    trains_on: ClassVar[Literal["steps", "samples", "pictures"]] = "samples"
    """Transitions of the sampler, which draws with noise; finished samples, at noise levels of its own; or the pictures
    of a data set, which it reads by itself, row by row."""
    rewards_are: ClassVar[Literal["scored", "differentiated", "trained"]] = "scored"
    """What it takes of the rewards: scores; gradients too, through them and the decoder; or one of them is trained
    beside the model: its module has `load_trained(scorers, folder)`, by which `genrl eval RUN` puts the reward into
    the state of the run's newest checkpoint."""
    refuses: ClassVar[Mapping[Refusable, str]] = {}
    """What it cannot go with, and why. `distributed.context`: several processes computing a sample together;
    `sampling.buckets`: samples of several sizes; `float16`, whose loss scale is for means of terms of order 1."""

    @property
    def updates(self) -> int:
        """Optimiser steps in one pass over the samples of an iteration."""
        return 1

    @property
    def reference(self) -> Literal["begun", "base"] | None:
        """The model before training that training evaluates: as it began, or without adapters, also where training goes
        on with one (`model.lora.from`); None = it evaluates none."""
        return None

    @property
    def compares(self) -> Literal["groups", "in_batch"] | None:
        """Whether a sample is compared with others of its prompt; in_batch: by the loss, so that a group is in one
        micro-batch."""
        return "groups"

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """Log-probabilities over the numbers of a latent."""
        return "mean"

    @property
    def branches(self) -> Literal["trees", "candidates"] | None:
        """Whether a state goes on in several ways: in trees, which updates and processes share out, or to candidates of
        which one goes on."""
        return None

    @property
    def other_guidance(self) -> tuple[float, ...]:
        """Scales of guidance, beside that of sampling, under which training evaluates the model."""
        return ()

    def optimizer_steps(self, iterations: int) -> int:
        """Optimiser steps of the model in so many iterations; at most these, where a run decides it by its scores."""
        return iterations * self.updates

    def cut(self, config: Config, num_processes: int) -> list[list[int]]:
        """Sizes of the micro-batches of each optimiser step of an iteration, over all processes: in samples, or trees
        where these are shared out."""
        sizes = in_pieces(config.sampling.images_per_iteration, config.sampling.batch_size)
        steps = pairwise(len(sizes) * k // self.updates for k in range(self.updates + 1))
        return [shared_out(sizes[first:last], num_processes, config.undivided) for first, last in steps]

    def calls(self, config: Config, guided: Guided) -> Calls:
        """Model calls of an iteration in closed form. As it is here: every sample is drawn in all steps and trained at
        one noise level, or with a transition at each step but the last."""
        images, guidance = config.sampling.images_per_iteration, guided(config.sampling.guidance_scale)
        steps = config.sampling.num_inference_steps
        levels = 1 if self.trains_on != "steps" else max(1, steps - 1)
        train = float(images * (self.optimizer_steps(1) // self.updates) * guidance * levels)
        return Calls(float(images * steps * guidance), train, train, float(levels))

    def snapshots(self, config: Config) -> list[str]:
        """Copies of the trained parameters that a run comes to keep, by what they are for; the reference aside."""
        return []

    def misfit(self, scheduler: str, is_flow: bool) -> Finding | None:
        """Why it cannot train a pipeline with a scheduler of this name. is_flow: the model predicts a velocity."""
        return None

    def check_data(self, config: Config, scorers: Any, prompts: list[Prompt]) -> None:
        """Raise ValueError for rewards (`rollout.scoring.Scorers`) or prompts that it cannot use; called before the
        model is loaded."""

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """What is wrong with files that it alone reads. train: the training prompts, None where they could not be read;
        notes: remarks that stop nothing are put here."""
        return iter(())

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        """How the samples of a group come about, for `genrl plan`. guidance: model calls per step."""
        if self.trains_on == "pictures":
            yield f"{self.algorithm} samples nothing: its pictures are given"
            return
        chains = make_plan(config.sampling.num_inference_steps, noise={}, roots=config.sampling.group_size)
        yield describe(chains, (), calls_per_state=guidance).rsplit("\n", 1)[0]
        yield f"{self.algorithm} trains on finished samples at noise levels, not on transitions"


class Updating(DiffusionMethod):
    """A method that may update the model several times from the samples of an iteration."""

    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch; at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration."""

    @property
    def updates(self) -> int:
        return self.updates_per_iteration

    @property
    def epochs(self) -> int:
        """Passes over the samples of an iteration."""
        return self.inner_epochs

    def optimizer_steps(self, iterations: int) -> int:
        return iterations * self.updates * self.epochs


def too_few_steps(config: Config, text: str) -> Iterator[Finding]:
    """Refuse a sampler of one step."""
    if config.sampling.num_inference_steps < 2:
        yield ("sampling.num_inference_steps", "trainer.algorithm"), text


def first_update(config: Config, updates: int) -> int:
    """Samples of the first of an iteration's updates, after which the policy is no longer the one that drew them."""
    sampling = config.sampling
    return min(sampling.images_per_iteration, sampling.batch_size * (sampling.micro_batches // updates))


def in_pieces(count: int, size: int) -> list[int]:
    """`count` in pieces of `size`, and the rest."""
    return [min(size, count - first) for first in range(0, count, size)]


def shared_out(sizes: Sequence[int], num_processes: int, undivided: int = 1) -> list[int]:
    """Sizes of an optimiser step's micro-batches, which are dealt to the processes like cards: as they are, or where
    some processes would wait, all as large, by multiples of `undivided`."""
    units = sum(sizes) // undivided
    count = min(-(-len(sizes) // num_processes) * num_processes, units)
    each, more = divmod(units, count)
    cut = [(each + (k < more)) * undivided for k in range(count)]
    return min(list(sizes), cut, key=lambda some: most_of_one(some, num_processes))


def most_of_one(sizes: Sequence[int], num_processes: int) -> int:
    """What the process has that has most, of micro-batches of these sizes."""
    return max(sum(sizes[process::num_processes]) for process in range(num_processes))


class Config(RunConfig):
    """One training run."""

    kind = "diffusion"

    model: Model
    """Which pipeline is trained, and how its weights are held."""
    prompts: Prompts
    """Prompts for training and evaluation."""
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)]
    """What is rewarded: a list of {name, weight, args}; the weighted sum is trained on."""
    sampling: Sampling = Sampling()
    """How samples are generated."""
    economy: Economy = Economy()
    """Which samples of a prompt are trained on."""
    trainer: Annotated[DiffusionMethod, ByName(), SerializeAsAny()]
    """Which algorithm, and its settings."""
    ema: EMA | None = EMA()
    """Moving average of the weights; null = none."""
    evaluation: Evaluation = Evaluation()
    """When and how held-out prompts are scored."""
    distributed: Processes = Processes()
    """Several processes."""
    engine: Engine | None = None
    """Where samples are generated; null = in the processes that train."""
    kernels: Kernels = Kernels()
    """Fused kernels, attention back-ends, compilation."""
    iterations: Count = 300
    """Rounds of sampling and training (DanceGRPO and MixGRPO: 300)."""

    @classmethod
    def completed(cls, written: Any) -> Any:
        """What a file says, with the whole name of a method that is called by its short one."""
        trainer = written.get("trainer") if isinstance(written, Mapping) else None
        name = trainer.get("algorithm") if isinstance(trainer, Mapping) else None
        if not isinstance(trainer, Mapping) or name not in CALLED:
            return written
        return {**written, "trainer": {**trainer, "algorithm": CALLED[name]}}

    @property
    def base(self) -> str:
        """Folder or hub id of the pipeline; of a single file, of the one that it was made from."""
        return self.model.config or self.model.path

    @property
    def reward_labels(self) -> tuple[str, ...]:
        """A short, unique name for each reward, in their order: `shapes`, `Brightness`, `ocr-2`."""
        return labels_of([reward.name for reward in self.rewards])

    @property
    def sharded_by(self) -> str:
        """The key that asks for shards, where one does; for messages."""
        return "distributed.fsdp" if self.distributed.fsdp else "model.offload.denoiser"

    @property
    def shards(self) -> bool:
        """Whether FSDP holds the denoisers."""
        return bool(self.distributed.fsdp) or self.model.offload.denoiser is not None

    @property
    def trains_shards(self) -> bool:
        """Whether what is trained is in shards."""
        return self.shards and self.model.lora is None

    @property
    def in_step(self) -> bool:
        """Whether several processes have to make their passes together."""
        return bool(self.distributed.fsdp) or self.trains_shards

    @property
    def together(self) -> int:
        """Processes that compute each sample together."""
        return self.distributed.context

    @property
    def undivided(self) -> int:
        """Samples that stay in one micro-batch, however these are cut."""
        if self.sampling.buckets:
            return self.sampling.batch_size  # all of one size
        in_batch = self.trainer.compares == "in_batch" or self.economy.keep is not None
        return self.sampling.group_size if in_batch else 1

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.trainer.optimizer_steps(self.iterations)

    @property
    def watchable(self) -> tuple[str, ...]:
        """The rewards, by their labels."""
        return self.reward_labels

    @property
    def age(self) -> tuple[str, int]:
        """The key that says how old samples may be, and what it says."""
        return "sampling.staleness", self.sampling.staleness

    def problems(self) -> Iterator[Finding]:
        """Settings that cannot work together."""
        from genrl.diffusion.config.combinations import problems

        yield from self.trainer.problems(self)
        yield from problems(self)
        yield from super().problems()

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """What is wrong with the model's folder, the prompt files and the rewards."""
        from genrl.diffusion.config.files import file_problems

        return file_problems(self, notes)
