"""Runs whose samples cannot be drawn by rollout workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.method import Finding

if TYPE_CHECKING:
    from genrl.config.schema import Config


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
        yield ("distributed.context", at), "a rollout worker draws its samples alone; write 1, or leave engine out"
    if config.kernels.compile:
        yield ("kernels.compile", at), "a graph compiled elsewhere may round differently; write false"
    if config.sampling.fit_batch:
        yield ("sampling.fit_batch", at), "what fits here need not fit there; find batch_size by hand"
    workers, pieces = engine.rollout_workers, sum(map(len, trainer.cut(config, 1)))
    if workers > pieces:
        text = f"{workers} workers, but micro-batches for {pieces} only in an iteration: each draws one at a time"
        yield ("engine.rollout_workers", "sampling.batch_size"), f"{text}; use {pieces} or less, or a smaller batch"
    address = engine.address
    if address is not None and not address.rpartition(":")[2].isdecimal() or "://" in (address or ""):
        yield ("engine.address",), f"{address!r} is no HOST:PORT of a cluster that this machine has joined; write one"
