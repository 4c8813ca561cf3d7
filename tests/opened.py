"""A run of any kind as `train` opens it, for tests that look at a method from inside."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from genrl.config import RunConfig, load
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.frame import Kind, kind_of
from genrl.runtime.loop.process import Process, make_accelerator
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.signals import Watchdog, catch_stop


@contextmanager
def opened(config: RunConfig, kind: Kind) -> Iterator[Any]:
    """The run, before its first iteration; `begin` is not called, and its folder not claimed."""
    accelerator, run = make_accelerator(config.distributed.timeout_s), Run(Path(config.output))
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        stop = stack.enter_context(catch_stop())
        progress = stack.enter_context(Progress(config.iterations, enabled=False))
        log = MetricLogger(run, (), enabled=accelerator.is_main_process)
        stack.callback(log.finish)
        prepared = kind.prepare(config, accelerator)
        watchdog = stack.enter_context(Watchdog(run, 600, rank=accelerator.process_index))
        yield kind.open(
            config, Process(accelerator, run, log, progress, watchdog, stop, config.together), prepared, stack
        )


def saved_again(file: str) -> None:
    """Child: open the run of a YAML file from its newest checkpoint, and write that anew."""
    config = load(Path(file))
    with opened(config, kind_of(config)) as run:
        result = checkpoint.latest(Run(Path(config.output)).checkpoints)
        assert result is not None
        run.loop.restore(result)
        run.begin(result)  # as the frame does: a run keeps some states only from here on
        run.loop.outdated = True
        run.loop.save()
