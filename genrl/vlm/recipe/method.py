"""The settings of a method that is a recipe: a published one by name, and what is changed of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from genrl.config.errors import Finding
from genrl.config.section import AnyOf, Count
from genrl.objectives import LARGEST_STALENESS_WEIGHT
from genrl.vlm.config.names import OUTPUTS
from genrl.vlm.config.schema import Row, VLMMethod
from genrl.vlm.recipe import Choice
from genrl.vlm.recipe.advantages import Advantage, GreedyBaseline, Hierarchical, SmoothedAdvantage
from genrl.vlm.recipe.losses import EntropyBonus, GroupLoss, Regression, Regulariser
from genrl.vlm.recipe.preset import Aggregation, Contradiction, Preset
from genrl.vlm.recipe.presets import PRESETS, PresetName
from genrl.vlm.recipe.shaping import RewardTerm, Transform
from genrl.vlm.recipe.surrogates import KlCov, LinearBound, Surrogate
from genrl.vlm.recipe.weights import EngineMismatch, TokenWeight

if TYPE_CHECKING:
    from genrl.vlm.config.schema import VLMConfig

ONE = ("advantage", "surrogate", "group_loss")
SEVERAL = ("transforms", "weights", "regularisers", "reward_terms")
OF_PICTURES = {"masked_image", "degraded", "ema", "divergence", "reference_probability"}
"""What only texts about pictures have (`Choice.tensors`)."""
FORWARDS = {
    "ref": "the model before training",
    "masked_image": "the picture masked",
    "degraded": "the picture degraded, in each update",
    "ema": "a moving average of the model",
    "reference_probability": "the right answer after each reasoning, and after none",
    "proxy": "whole distributions, without their least likely tokens",
}
"""Further evaluations of the same tokens, without gradient, by what a choice reads of them."""


ByName = (Field(discriminator="name"), AnyOf(alone=True))


class RecipeMethod(VLMMethod):
    """A published method by name, and what is changed of it. A function is written by its name, `sapo`, or with
    constants, `{name: clip, high: 0.28}`; constants that are not written are the preset's, where it has the function.
    Without a name, `{high: 0.28}`, it is the preset's own."""

    preset: PresetName = "grpo"
    """The method; the functions below are null = as it has them."""
    advantage: Annotated[Advantage, *ByName] | None = None
    """From rewards to advantages."""
    transforms: tuple[Annotated[Transform, *ByName], ...] | None = None
    """Changes of the advantages, in order."""
    weights: tuple[Annotated[TokenWeight, *ByName], ...] | None = None
    """Factors per token."""
    surrogate: Annotated[Surrogate, *ByName] | None = None
    """Ratio and clip rule."""
    group_loss: Annotated[GroupLoss, *ByName] | None = None
    """A loss of whole groups, in its place."""
    aggregation: Aggregation | None = None
    """From terms per token to one number."""
    regularisers: tuple[Annotated[Regulariser, *ByName], ...] | None = None
    """Added to the loss; [] = none."""
    reward_terms: tuple[Annotated[RewardTerm, *ByName], ...] | None = None
    """Added to the rewards."""
    updates: Count = 1
    """Optimiser steps per pass over an iteration's answers, each on a part of the groups (GSPO: 4)."""
    epochs: Count = 1
    """Passes over an iteration's answers."""
    micro_batch: Count | None = None
    """Answers per pass of the model, to save memory; null = all of an update."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any) -> Any:
        return cls.completed(written) if isinstance(written, Mapping) else written

    @classmethod
    def completed(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Complete what is written by the constants that its functions have in the preset."""
        preset = PRESETS.get(written.get("preset", cls.model_fields["preset"].default))
        if preset is None:
            return written
        changes: dict[str, Any] = {}
        for key in ONE:
            choices = [choice] if (choice := getattr(preset, key)) is not None else []
            if key in written:
                value = written[key]
                named = {"name": choices[0].name, **value} if choices and isinstance(value, Mapping) else value
                changes[key] = _completed(named, choices)
        for key in SEVERAL:
            if isinstance(written.get(key), list | tuple):
                changes[key] = [_completed(value, getattr(preset, key)) for value in written[key]]
        return {**written, **changes}

    @property
    def composed(self) -> Preset:
        """The functions: those that are written, else the preset's. Raises Contradiction."""
        preset = PRESETS[self.preset]
        changes = {key: value for key in (*ONE, *SEVERAL, "aggregation") if (value := getattr(self, key)) is not None}
        # writing one of the two takes the place of the preset's other
        if "surrogate" in changes and "group_loss" not in changes:
            changes["group_loss"] = None
        if "group_loss" in changes and "surrogate" not in changes:
            changes["surrogate"] = None
        return replace(preset, **changes)

    def recipe(self, config: VLMConfig) -> Preset:
        """`composed`, with what other sections decide: the longest answer, and the correction of an engine that
        samples, or of older weights."""
        preset = self.composed
        if preset.aggregation == "const":
            preset = replace(preset, length=config.generation.max_new_tokens)
        has_mismatch = any(isinstance(weight, EngineMismatch) for weight in preset.weights)
        corrected = self.weights is not None or has_mismatch
        # older weights sampled, so that importance weights come before the clip
        if config.generation.staleness and not has_mismatch and preset.group_loss is None:
            return replace(preset, weights=(*preset.weights, decoupling(preset)))
        # Two programs never round alike, so what an engine sampled is off policy from the start. Whoever writes
        # `weights` decides.
        if config.generation.vllm is not None and not corrected and preset.group_loss is None:
            preset = replace(preset, weights=(*preset.weights, EngineMismatch()))  # TRL's default
        return preset

    @property
    def name(self) -> str:
        return self.preset

    @property
    def rows_per_pass(self) -> int | None:
        return self.micro_batch

    @property
    def reads(self) -> frozenset[str]:
        return self.composed.reads

    def iteration(self, config: VLMConfig) -> Iterator[Row]:
        yield from super().iteration(config)
        yield from self.learned(config)

    def learned(self, config: VLMConfig) -> Iterator[Row]:
        """Rows of what is done with the samples."""
        yield "updates", f"{self.updates * self.epochs:,}", f"{self.epochs} passes"
        if "greedy" in self.reads:
            yield "greedy answers", f"{config.generation.prompts_per_iteration:,}", "one to each question"
        for name in [name for name in FORWARDS if name in self.reads]:
            yield "further forward", name, FORWARDS[name]

    def problems(self, config: VLMConfig) -> Iterator[Finding]:
        """Functions that do not go together, or not with the other sections."""
        try:
            preset = self.composed
        except Contradiction as error:
            yield (self.key(error.field),), str(error)
            return
        if preset.output not in (None, config.vlm.output) and config.vlm.output in OUTPUTS.built_in:
            text = f"{self.preset} is of models whose output is {preset.output}; write it, or preset: grpo"
            yield ("trainer.preset", "vlm.output"), text
            return
        yield from self.refused(config, preset)

    def refused(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        """What cannot work of functions that go together."""
        if config.generation.staleness and not (preset.surrogate is not None and preset.surrogate.near):
            field, loss = "surrogate" if preset.surrogate else "group_loss", preset.surrogate or preset.group_loss
            text = f"older answers are weighed in losses of clipped ratios, {loss and loss.name!r} is none; write 0"
            yield (self.key(field), "generation.staleness"), text
        yield from self._of_groups(config, preset)
        yield from self._of_outputs(config, preset)

    def key(self, field: str) -> str:
        """Key by which a function was chosen: its own, or the preset."""
        return "trainer.preset" if getattr(self, field, None) is None else f"trainer.{field}"

    def _of_groups(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        size, advantage = config.generation.group_size, preset.advantage
        if size < 2 and advantage.needs_group:
            text = f"{advantage.name!r} compares the answers of a group; write 2 or more (8 is usual)"
            yield ("generation.group_size",), text
        if config.economy.keep is not None and isinstance(advantage, GreedyBaseline | SmoothedAdvantage):
            text = f"{advantage.name!r} compares with more than the answers of a group that are kept; leave it out"
            yield ("economy.keep", self.key("advantage")), text
        if preset.group_loss is not None and self.micro_batch is not None and self.micro_batch < size:
            text = f"{preset.group_loss.name!r} is a loss of whole groups; write {size} (generation.group_size) or more"
            yield ("trainer.micro_batch",), text
        if isinstance(preset.group_loss, Regression) and self.updates == self.epochs == 1:
            text = "the regression compares with what the weights were; write 2 or more updates or epochs"
            yield ("trainer.epochs",), text
        if isinstance(preset.surrogate, KlCov) and self.updates == self.epochs == 1:
            text = "the penalty of moving away acts from the second update on; write 2 or more updates or epochs"
            yield ("trainer.epochs",), text

        if "greedy" in self.reads and config.synthesis is not None:
            text = "descriptions that are worth what others answer have no greedy one; nearest: rloo"
            yield (self.key("advantage"), "synthesis"), text

    def _of_outputs(self, config: VLMConfig, preset: Preset) -> Iterator[Finding]:
        output, makes, pictured = config.vlm.output, config.vlm.makes, preset.reads & OF_PICTURES
        if makes and any(isinstance(regulariser, EntropyBonus) for regulariser in preset.regularisers):
            text = f"entropies of a model whose output is {output} have no gradient; nearest: entropy_penalty"
            yield (self.key("regularisers"),), text
        if makes and pictured:
            text = f"it reads {min(pictured)}, of texts about pictures; this model's output is {output}"
            yield ("trainer.preset",), f"{text}; nearest: grpo"
        if makes and "proxy" in preset.reads:
            text = f"it reads whole distributions over texts; this model's output is {output}; nearest: clip"
            yield (self.key("surrogate"), "vlm.output"), text
        if isinstance(preset.advantage, Hierarchical) and output != "voxels" and output in OUTPUTS.built_in:
            yield (self.key("advantage"),), "only answers of two steps have it; write vlm.output: voxels, or group"
        if isinstance(preset.surrogate, LinearBound) and output != "masked_text" and output in OUTPUTS.built_in:
            text = "its columns are bounds of a masked diffusion model; write output: masked_text, or surrogate: clip"
            yield (self.key("surrogate"), "vlm.output"), text


def decoupling(preset: Preset) -> EngineMismatch:
    """The weight of answers that older weights drew, which makes PPO a decoupled one, as in AReaL (arXiv 2505.24298):
    of every token, or where the ratio is that of an answer, with its length taken out as there; 0 above the same bound
    as `staleness_weight`."""
    of_rows = preset.surrogate is not None and preset.surrogate.one_ratio
    high = LARGEST_STALENESS_WEIGHT
    return EngineMismatch(level="sequence_geo" if of_rows else "token", mode="mask", high=high)


def _completed(written: Any, known: Sequence[Choice]) -> Any:
    """A function with its constants; those that are not written are those of `known`, where it is there."""
    if isinstance(written, str):
        written = {"name": written}
    if not isinstance(written, Mapping):
        return written
    of_preset = next((choice for choice in known if choice.name == written.get("name")), None)
    return written if of_preset is None else {**of_preset.model_dump(mode="json"), **written}
