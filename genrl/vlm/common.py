"""The base of runs that answer questions and of runs of episodes: which weights draw, how rows become advantages, and
what is said and saved at the end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from accelerate.utils import gather_object
from torch import Tensor, nn

from genrl.runtime.folder.hub import whole_folder
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.frame import halvings, say_result
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.running import Groups, TrainingRun
from genrl.runtime.weights.sharding import in_step
from genrl.runtime.weights.weights import Weights
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import answering, weights_changed
from genrl.vlm.engines.vllm import use_vllm
from genrl.vlm.methods.policy_loss import Estimate, estimate
from genrl.vlm.methods.updates import Update, batch_of_all, ours, updates_of
from genrl.vlm.policies.folder import hold, load_trained, open_policy, save_model
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.rollout.token_batch import TokenBatch

SEEN = 0.02
"""Accuracy or success with pictures over that without them, below which reinforcement has nothing to work on."""
SAMPLER_GAP = 0.1
"""Mean difference of log-probabilities between sampler and trainer above which something is wrong (spec 6.3)."""


class Estimated(NamedTuple):
    """batch: this process's rows, with advantages and weights, `extra["row"]` their numbers; estimate: that of all
    rows; updates: how they are shared out."""

    batch: TokenBatch
    estimate: Estimate
    updates: list[Update]


class Headed(NamedTuple):
    """What a loss is called with where a method trains modules beside the policy."""

    policy: Policy
    heads: Mapping[str, nn.Module]


def check_gap(gap: float) -> None:
    """Raise RuntimeError where sampler and trainer do not see the same."""
    if not gap <= SAMPLER_GAP:
        raise RuntimeError(
            f"the trainer and the sampler assign different log-probabilities to the same tokens: {gap:.3g} apart on "
            "average before any training. Look for another resizing of pictures, chat template, position ids or "
            "precision."
        )


def trained_weights(policy: Policy, heads: Mapping[str, nn.Module]) -> Weights:
    """The parameters that are trained, of the model and of what is trained beside it."""
    model: Any = nn.ModuleDict({"policy": policy.model, **heads}) if heads else policy.model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Weights(named, in_step=in_step(model))


def open_reference(config: VLMConfig, process: Process, policy: Policy) -> Policy | None:
    """The model before training where a loss reads it; None where nothing does, or it is the policy without its LoRA.
    Both are in shards from here on, where the run has these."""
    reference = None
    if any("ref" in part.trainer.reads for part in config.parts) and policy.peft is None:
        reference = open_policy(config, process.accelerator.device)
        reference.model.requires_grad_(False)
    hold(config, policy, *([] if reference is None else [reference]))
    return reference


class VLMRun(TrainingRun[VLMConfig]):
    """One process of one run of a vision-language model.

    reference: the model before training where the loss reads it and there is no LoRA. groups, options: as of
    `TrainingRun`. heads: modules whose weights are saved with the policy's.
    """

    policy: Policy
    result: ClassVar[tuple[str, str]]
    """The metric that says how good the model is, and what the report shows."""

    def __init__(
        self,
        config: VLMConfig,
        process: Process,
        policy: Policy,
        reference: Policy | None,
        groups: Groups,
        heads: Mapping[str, nn.Module],
        **options: Any,
    ) -> None:
        weights, staleness = trained_weights(policy, heads), config.generation.staleness
        super().__init__(config, process, policy, weights, groups, staleness=staleness, **options)
        self.reference, self.heads = reference, heads
        self.preset: Preset | None = config.trainer.recipe(config)
        self.present = config
        self.sampler = use_vllm(config, policy, process, self.loop.optimizer)
        """The engine that samples, where the model does not."""

    @property
    def config(self) -> VLMConfig:
        """The configuration of the present stage; `loop.config` is that of the run."""
        return self.present

    @property
    def reads(self) -> frozenset[str]:
        """What the loss reads beside rewards and log-probabilities."""
        return frozenset() if self.preset is None else self.preset.reads

    @property
    def whole_groups(self) -> bool:
        """Whether a pass of the model has no part of a group."""
        return self.preset is not None and self.preset.group_loss is not None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """`TrainingRun.drawing` and `answering`; what the policy computed by other weights is forgotten."""
        with super().drawing():
            # Prefixes that were computed with the present weights say nothing of older ones.
            if self.age:
                weights_changed(self.policy)
            with answering(self.policy):
                yield
        if self.age:
            weights_changed(self.policy)

    def updates(self, mask: Tensor, size: int) -> list[Update]:
        """How rows mask [B, T], in groups of `size`, are shared out to optimiser steps and micro-batches."""
        settings = cast(RecipeMethod, self.config.trainer)
        return updates_of(
            mask,
            size,
            updates=settings.updates,
            micro=settings.micro_batch,
            seed=self.config.seed,
            loop=self.loop,
            whole_groups=self.whole_groups,
        )

    def estimated(self, rows: Mapping[str, Tensor], size: int, updates: list[Update], **known: Any) -> Estimated:
        """Advantages and weights of this process's rows, tensors by name, from those of all processes. known: further
        arguments of `estimate`."""
        assert self.preset is not None, "the methods whose rows are estimated have one"
        counts = gather_object([len(rows["mask"])])
        estimate_of_all = estimate(self.preset, batch_of_all(rows, size), **known)
        # Only now are both of the same weights: later the gap holds what training has changed since an engine's update.
        if self.loop.iteration == 0 and "sampler" in rows:
            check_gap(estimate_of_all.metrics["sampler_gap_mean"])
        share = ours(estimate_of_all.batch, counts, self.process.rank, rows["mask"].shape[1])
        return Estimated(share, estimate_of_all, updates)

    def finish(self, row: dict[str, float]) -> None:
        """End the iteration with what was measured in it."""
        row |= {"lr": self.loop.lr} | self.aged
        self.loop.finish(row)

    def evaluate(self, iteration: int) -> dict[str, float]:
        """What `evaluated` measures with the weights that the loop has put in place: the average's, where there is
        one."""
        if self.loop.config.ema is not None:
            weights_changed(self.policy)
        row = self.evaluated(iteration)
        if self.loop.config.ema is not None:  # the caller puts the trained ones back
            weights_changed(self.policy)
        return row

    @abstractmethod
    def evaluated(self, iteration: int) -> dict[str, float]:
        """Metrics on held-out data."""

    def warn_blind(self, seeing: float, blind: float, what: str) -> None:
        """Say that the model does not see what it is asked, where black pictures do as well."""
        if seeing - blind < SEEN:
            self.process.progress.say(
                f"warning: {seeing:.3f} of the {what}, {blind:.3f} with black pictures: the model does not go by what "
                "it sees, and reinforcement learning will hardly teach it to"
            )

    @abstractmethod
    def rows_at_most(self) -> int:
        """The rows that a process has in an update."""

    def micro_batch_sizes(self) -> list[int]:
        """Rows per pass of the model, and the smaller numbers that can be taken."""
        config = self.config
        size = (config.economy.keep or config.generation.group_size) if self.whole_groups else 1
        return halvings(config.trainer.rows_per_pass or self.rows_at_most(), size)

    def resize(self, size: int) -> None:
        """Give passes so many rows from here on."""
        self.loop.config, self.present = (config.with_micro_batch(size) for config in (self.loop.config, self.present))

    def forget(self) -> None:
        """Samples of an iteration that is undone are no part of this; the weights are those of its beginning."""
        weights_changed(self.policy)

    def hand_over(self) -> Any:
        """The model as trained, with its adapters."""
        super().hand_over()
        return self.policy.model if self.policy.peft is None else self.policy.peft

    def conclude(self) -> None:
        """The end of a run, complete or not: the model's folder, its average's weights where the run keeps one, report,
        and where they are."""
        loop, (metric, pictures) = self.loop, self.result
        folder = loop.process.run.folder / "model"
        with whole_folder(folder) as place:
            if loop.weights.is_sharded:  # this process has a share; the checkpoint just written has the whole
                save_model(load_trained(loop.config, loop.process.run.folder), loop.config.vlm.path, place)
            else:
                with loop.averaged():
                    save_model(self.policy, loop.config.vlm.path, place)
        rows = read_metrics(loop.process.run.metrics)
        result = f"the model, as transformers saves it: {folder}"

        def write(place: Path, step: int) -> None:
            save_model(load_trained(loop.config, loop.process.run.folder, step), loop.config.vlm.path, place)

        best = loop.process.run.folder / "model-best"
        say_result(loop, rows, metric, label=metric, pictures=pictures, result=result, best=best, write=write)
