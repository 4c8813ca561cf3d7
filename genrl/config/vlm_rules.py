"""Combinations of settings of a vision-language model's run that cannot work, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.combinations import Finding, ImpossibleConfig

if TYPE_CHECKING:
    from genrl.config.vlm import VLMConfig

EPISODES = "learns from episodes with a critic, and this run asks single questions"
MASKED = "is of masked diffusion language models, and this run trains autoregressive ones"
ELSEWHERE = {"vl_dac": EPISODES, "poad": EPISODES, "bgpo": MASKED, "just_grpo": MASKED}
"""Presets whose loss is there, but not what it is trained on here."""


def refuse_impossible(config: VLMConfig) -> None:
    """Raise ImpossibleConfig with everything that cannot work together."""
    found = [*_questions(config), *_updates(config), *_groups(config)]
    if found:
        raise ImpossibleConfig(found)


def _questions(config: VLMConfig) -> Iterator[Finding]:
    task = config.task
    if (task.name is None) == (task.train is None):
        yield ("task.name", "task.train"), "write one of them: a generated task, or data"
    if task.name is not None and task.eval is not None:
        yield ("task.eval", "task.name"), "a generated task has held-out questions of its own; leave eval out"
    if task.train is not None and task.eval is None and config.evaluation.every:
        yield ("task.eval", "evaluation.every"), "held-out data is needed; write it, or evaluation.every: 0"
    if task.train is not None and task.train == task.eval:
        yield ("task.eval", "task.train"), "held-out questions must be others than those trained on"


def _updates(config: VLMConfig) -> Iterator[Finding]:
    trainer, generation = config.trainer, config.generation
    if trainer.preset in ELSEWHERE:
        text = f"{trainer.preset} {ELSEWHERE[trainer.preset]}; nearest: grpo"
        yield ("trainer.preset",), text
    if trainer.updates > generation.prompts_per_iteration:
        text = f"{trainer.updates} updates need a group each; there are {generation.prompts_per_iteration}"
        yield ("trainer.updates", "generation.prompts_per_iteration"), text
    if trainer.resample and trainer.filter == "none":
        yield ("trainer.resample", "trainer.filter"), "without a filter no group is missing; write filter: spread"
    if generation.batch_size is not None and generation.batch_size < generation.group_size:
        text = "answers to a question are drawn together; write group_size or more"
        yield ("generation.batch_size", "generation.group_size"), text


def _groups(config: VLMConfig) -> Iterator[Finding]:
    if all(reward.weight == 0 for reward in config.rewards):
        yield ("rewards",), "all weights are 0: nothing is trained"
    if config.generation.group_size < 2 and config.trainer.filter == "spread":
        yield ("trainer.filter", "generation.group_size"), "one answer has no spread; write 2 or more (8 is usual)"
    if config.distributed.fsdp:
        yield ("distributed.fsdp",), "vision-language models are not sharded; write false"
