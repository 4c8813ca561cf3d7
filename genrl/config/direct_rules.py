"""Combinations that cannot work where a reward is differentiated (draft, diff_instruct). Values only, as its caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genrl.config.schema import Config

Finding = tuple[tuple[str, ...], str]

DIRECT = ("draft", "diff_instruct")


def direct_rules(config: Config) -> Iterator[Finding]:
    """What keeps a gradient from the reward, or a step from being the only one."""
    trainer, sampling = config.trainer, config.sampling
    if trainer.algorithm not in DIRECT:
        return
    for index, reward in enumerate(config.rewards):
        if reward.weight != 0:
            yield from _gradients_end(config, index)
    if trainer.algorithm == "draft":
        if trainer.steps is not None and trainer.steps > sampling.num_inference_steps:
            text = f"the sampler has {sampling.num_inference_steps} steps; use {sampling.num_inference_steps} or less"
            yield ("trainer.steps", "sampling.num_inference_steps"), text
        return
    if sampling.num_inference_steps != 1:
        text = f"the generator draws in one step, found {sampling.num_inference_steps}; write 1"
        yield ("sampling.num_inference_steps", "trainer.algorithm"), text
    if config.evaluation.num_inference_steps not in (None, 1):
        text = "the one-step generator is evaluated, not its teacher; write null"
        yield ("evaluation.num_inference_steps", "trainer.algorithm"), text
    for key, scale in (
        ("sampling.guidance_scale", sampling.guidance_scale if sampling.guidance_scale is not None else 2.0),
        ("evaluation.guidance_scale", config.evaluation.guidance_scale or 1.0),
    ):
        if scale > 1:
            text = "guidance is learnt from the teacher (trainer.guidance), the generator itself has none; write 1"
            yield (key, "trainer.algorithm"), text
    if "true_cfg_scale" in sampling.pipeline_args:
        text = "guidance is learnt from the teacher (trainer.guidance), the generator itself has none; remove it"
        yield ("sampling.pipeline_args.true_cfg_scale", "trainer.algorithm"), text
    if config.distributed.fsdp:
        text = "the assistant network is not sharded; write false, and train adapters (model.lora)"
        yield ("distributed.fsdp", "trainer.algorithm"), text


def _gradients_end(config: Config, index: int) -> Iterator[Finding]:
    """Settings of a reward behind which it has no gradients."""
    reward, at, algorithm = config.rewards[index], f"rewards.{index}", config.trainer.algorithm
    for key, wanted in (("remote", "null"), ("isolate", "false")):
        if getattr(reward, key):
            text = f"{algorithm} needs the reward's gradient, which stays in the process that computes it"
            yield (f"{at}.{key}", "trainer.algorithm"), f"{text}; write {wanted}, or give it weight 0"
    if reward.gate is not None:
        text = f"{algorithm} differentiates the reward itself, not what a gate makes of it; write null"
        yield (f"{at}.gate", "trainer.algorithm"), text
    if reward.normalize != "none":
        text = f"{algorithm} differentiates the reward itself, with its weight as it is; write none"
        yield (f"{at}.normalize", "trainer.algorithm"), text
