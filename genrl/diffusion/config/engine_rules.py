"""Runs whose samples cannot be drawn by rollout workers, or by earlier weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


def engine_rules(config: Config) -> Iterator[Finding]:
    """What rollout workers cannot draw, and what would not be the same there."""
    engine, trainer = config.engine, config.trainer
    if engine is None:
        return
    at, name, here = "engine", trainer.algorithm, "leave engine out"
    if trainer.reads_pictures:
        yield (at, "trainer.algorithm"), f"{name} trains on given pictures, so there is nothing to draw; {here}"
    if trainer.keeps_graphs:
        text = "the graphs of sampling stay in the process that drew; write false, or leave engine out"
        yield ("trainer.keep_graph", at), text
    if trainer.branches and not trainer.grows_trees:
        yield (at, "trainer.algorithm"), f"{name} keeps the candidates of each step beside the samples; {here}"
    if config.shards:
        text = "is for models that one process cannot hold, and every rollout worker holds the whole one; leave one out"
        yield (config.sharded_by, at), text
    if config.distributed.context > 1:
        yield ("distributed.context", at), "a rollout worker computes its samples alone; write 1, or leave engine out"
    if config.kernels.compile:
        yield ("kernels.compile", at), "a graph compiled elsewhere may round differently; write false"
    if config.sampling.fit_batch:
        yield ("sampling.fit_batch", at), "what fits here need not fit there; find batch_size by hand"
    workers, pieces = engine.rollout_workers, sum(map(len, trainer.cut(config, 1)))
    if workers > pieces:
        text = f"{workers} workers, but micro-batches for {pieces} only in an iteration: each samples one at a time"
        yield ("engine.rollout_workers", "sampling.batch_size"), f"{text}; use {pieces} or less, or a smaller batch"
    if engine.reward_workers:
        yield from _reward_workers(config, engine.reward_workers, pieces)
    address = engine.address
    if address is not None and not address.rpartition(":")[2].isdecimal() or "://" in (address or ""):
        yield ("engine.address",), f"{address!r} is no HOST:PORT of a cluster that this machine has joined; write one"


def _reward_workers(config: Config, workers: int, pieces: int) -> Iterator[Finding]:
    """Rewards that Ray actors cannot hold."""
    at, trainer = "engine.reward_workers", config.trainer
    if trainer.trains_reward or trainer.differentiates_rewards:
        text = f"{trainer.algorithm} needs the reward's weights or gradients, which are where it is trained; write 0"
        yield (at, "trainer.algorithm"), text
    for number, reward in enumerate(config.rewards):
        if reward.offload:
            yield (f"rewards.{number}.offload", at), "the model is in another process, which keeps it; write false"
        if "device" in reward.args and reward.remote is None:
            yield (f"rewards.{number}.args.device", at), "Ray gives each worker its device; leave it out"


def staleness_rules(config: Config) -> Iterator[Finding]:
    """What cannot learn from samples that earlier weights drew."""
    at, trainer, staleness = "sampling.staleness", config.trainer, config.sampling.staleness
    if not staleness:
        return
    if not trainer.takes_older_samples:
        yield (at, "trainer.algorithm"), f"{trainer.algorithm} learns from samples of the present weights; write 0"
    if trainer.grows_trees:
        yield (at, "trainer.tree"), "trees were not tried with it; write 0"
    if trainer.keeps_graphs:
        yield ("trainer.keep_graph", at), "kept graphs are of the weights that drew; write false"
    if not getattr(trainer, "guidance_in_training", True):
        text = "samples are weighted by the policy that sampled, and another one is trained; write 0"
        yield (at, "trainer.guidance_in_training"), text
    if config.distributed.context > 1:
        yield ("distributed.context", at), "was not tried with it; write 1"
    if config.shards:
        yield (config.sharded_by, at), "weights in shards are not kept for later; write 0"
    for number, reward in enumerate(config.rewards):
        if reward.offload and config.engine is not None:
            text = "pictures are scored while the model is trained, so neither makes room for the other; write false"
            yield (f"rewards.{number}.offload", at), text
