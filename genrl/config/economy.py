"""Prompt economy: the section that pictures and language share, and where it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from genrl.config.method import Finding
from genrl.config.section import Count, Section, Share, Ways, Whole

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config, Sampling
    from genrl.vlm.config.schema import Generation, VLMConfig


class Replay(Section):
    """Ask prompts again that had good and bad samples (Prompt Replay, arXiv 2603.21177)."""

    share: Share = 0.5
    """Largest share of an iteration's prompts that were asked before; the others are the next of the data."""
    cooldown: Whole = 2
    """Iterations in between."""
    times: Count = 4
    """Most times that a prompt is asked in the run, the first one included."""


class Selection(Section):
    """Choose prompts by what their samples have been worth (MoPPS, arXiv 2507.04632)."""

    by: Literal["success", "spread"]
    """success = rate of samples whose first reward is at least 1 (answers: evaluation.right_at), nearest to one half;
    spread = largest variance of the total reward within the group, for rewards that are not just right or wrong."""
    discount: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.5
    """What an earlier visit counts, compared with the one after it; the model changes (MoPPS on geometry: .5)."""
    candidates: Count = 8
    """Prompts looked at for each that is asked (MoPPS on geometry: 8)."""
    replay: Replay | None = None
    """Ask useful prompts again; null = only as the data comes round."""


class Economy(Section):
    """Which prompts are asked, and which of their samples are trained on (docs/economy.md)."""

    selection: Selection | None = None
    """Choose prompts by what their samples have been worth; null = all, equally often."""
    keep: Ways | None = None
    """Train on so many samples of each group, those with the largest variance of the total reward (PODS, arXiv
    2504.13818); null = all."""


def picture_economy(config: Config) -> Iterator[Finding]:
    """Why a run that trains a pipeline cannot choose its prompts or samples so."""
    economy, sampling, trainer = config.economy, config.sampling, config.trainer
    yield from _shared(economy, sampling, "sampling")
    name, at = trainer.algorithm, "economy.selection"
    if economy.selection is not None:
        if trainer.reads_pictures:
            yield (at, "trainer.algorithm"), f"{name} trains on given pictures in their order; leave it out"
        if sampling.buckets:
            yield (at, "sampling.buckets"), "micro-batches are of one size, chosen prompts are not; leave out one"
        for number, reward in enumerate(config.rewards):
            if economy.selection.by == "spread" and reward.normalize == "group":
                text = "scores that are normalised in groups all have the same spread; write none"
                yield (f"rewards.{number}.normalize", f"{at}.by"), text
    if economy.keep is None:
        return
    size, group = sampling.batch_size, sampling.group_size
    if not trainer.takes_part_of_groups or trainer.grows_trees:
        text = f"{name} reads whole groups; leave it out, or use flow_grpo without a tree, or diffusion_nft"
        yield ("economy.keep", "trainer.algorithm"), text
    elif size % group:
        text = f"each micro-batch is to keep as many samples, so {size} must be whole groups of {group}"
        near = max(1, round(size / group)) * group
        yield ("sampling.batch_size", "sampling.group_size", "economy.keep"), f"{text}; use {near}"
    if trainer.keeps_graphs:
        yield ("trainer.keep_graph", "economy.keep"), "kept graphs are of all samples; write false"
    if config.kernels.compile:
        text = "smaller micro-batches are replayed by another graph; write false, or leave keep out"
        yield ("kernels.compile", "economy.keep"), text


def answer_economy(config: VLMConfig) -> Iterator[Finding]:
    """Why a run that trains a language model cannot choose its questions or answers so."""
    economy, generation = config.economy, config.generation
    yield from _shared(economy, generation, "generation")
    chosen = [f"economy.{key}" for key in ("selection", "keep") if getattr(economy, key) is not None]
    for key in chosen:
        if config.environment is not None:
            yield (key, "environment"), "is for answers to questions, not for episodes; leave it out"
        if config.synthesis is not None:
            yield (key, "synthesis"), "was not tried with pictures made in the run; leave it out"
    if economy.selection is not None:
        at = "economy.selection"
        if not all(part.trainer.samples for part in config.parts):
            yield (at, "trainer.algorithm"), "answers that are given are not scored; leave it out"
        if config.stages:
            yield (at, "stages"), "what is known of a question is of one stage; leave it out"
        if config.task.curriculum is not None:
            yield (at, "task.curriculum"), "both say which questions come first; leave out one"
    if economy.keep is not None and not all(part.trainer.takes_part_of_groups for part in config.parts):
        yield ("economy.keep", "trainer.algorithm"), "the method reads whole groups; leave it out, or write grpo"


def _shared(economy: Economy, sampled: Sampling | Generation, section: str) -> Iterator[Finding]:
    at, chosen, group, staleness = "economy.selection", economy.selection, sampled.group_size, sampled.staleness
    if chosen is not None:
        if chosen.replay is not None and chosen.replay.share * sampled.prompts_per_iteration < 1:
            text = f"{chosen.replay.share:g} of {sampled.prompts_per_iteration} prompts are less than one; use a larger"
            yield (f"{at}.replay.share", f"{section}.prompts_per_iteration"), f"{text} share or leave replay out"
        if chosen.candidates == 1 and chosen.replay is None:
            yield (f"{at}.candidates", f"{at}.replay"), "one prompt leaves nothing to choose; write 8, or give replay"
        if chosen.by == "spread" and group < 2:
            yield (f"{at}.by", f"{section}.group_size"), "one sample has no spread; write 2 or more"
        if staleness:
            text = "prompts are chosen by results of the iteration before, samples are drawn before them; write 0"
            yield (f"{section}.staleness", at), text
    if economy.keep is not None and economy.keep >= group:
        text = f"a group has {group} samples, so none is left out; write {max(2, group // 2)}, or leave it out"
        yield ("economy.keep", f"{section}.group_size"), text
