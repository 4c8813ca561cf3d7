"""The one frame of all runs: claim the folder, open, restore, train, finish; and again in smaller pieces where memory
runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from genrl.config import RunConfig
from genrl.config.errors import command
from genrl.config.method import code_of, methods_of
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.hub import whole_folder
from genrl.runtime.folder.run import Run, Script, unchanged_where_refused
from genrl.runtime.folder.trackers import check_trackers
from genrl.runtime.loop import collapse
from genrl.runtime.loop.guards import StoppedTogether
from genrl.runtime.loop.loop import Interrupted, Loop, MemoryRanOut
from genrl.runtime.loop.process import Claim, Process, begin, claim, make_accelerator
from genrl.runtime.loop.progress import tolerant_streams
from genrl.runtime.loop.running import TrainingRun
from genrl.runtime.loop.signals import killed_ranks
from genrl.runtime.show.report import write_report
from genrl.runtime.show.sheet import ContactSheet
from genrl.runtime.weights.devices import empty_cache, tf32
from genrl.runtime.weights.optimizers import check_optimizer

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What differs between runs of pipelines, token models and robot policies.

    What it opens is a `TrainingRun`.
    """

    unit: str
    """Of progress."""
    check_processes: Callable[[Any, int], None]
    """(configuration, number of processes): ValueError where they do not fit together."""
    prepare: Callable[[Any, Accelerator], Any]
    """What is loaded, and may raise ValueError, before anything is written."""
    open: Callable[[Any, Process, Any, ExitStack], TrainingRun[Any]]
    """(configuration, process, what was prepared, stack that closes it) -> the run."""
    reopen: Callable[[Any, str, int], Any]
    """(configuration, device, iteration) -> the model without the run (`replay.Reopened`)."""
    memory_hint: str
    """Which keys to lower where memory runs out."""


def kind_of(config: RunConfig) -> Kind:
    """The kind of run that a configuration describes: `KIND` of `genrl.<kind>.train`."""
    # By name: the kinds import this module, and a run of one kind never loads the libraries of the others.
    kind: Kind = import_module(f"genrl.{config.kind}.train").KIND
    return kind


class Ended(NamedTuple):
    """What came of a run, complete or not."""

    folder: Path
    trained: Any
    """What was trained, for use without the run: a pipeline, a model of transformers, a policy."""
    is_complete: bool
    exit_code: int
    """130, 143 or 129 where the process was asked to end, else 0."""


def train(config: RunConfig, resume: Path | None = None) -> Path:
    """`run`; returns the folder. Raises SystemExit (130, 143, 129) where the process was asked to end and has saved."""
    ended = run(config, resume)
    if ended.exit_code:
        raise SystemExit(ended.exit_code)
    return ended.folder


def run(config: RunConfig, resume: Path | None = None, script: Script | None = None) -> Ended:
    """Train as `config` says, into its run folder, or go on in the folder `resume`. script: that which calls, if it is
    not the command line.

    Every process of a distributed run calls this. Raises ConfigError or ValueError for what is wrong before work
    starts.
    """
    with ExitStack() as stack:
        claimed, process, run = _opened(stack, config, resume, script)
        if script is not None:
            run.loop.on_iteration = script.on_iteration
        stack.enter_context(process.watchdog)  # from here on there is progress to watch; loading has none to tell
        run.begin(claimed.last_checkpoint)
        with saved_on_error(run.loop):
            _train(run, kind_of(config).memory_hint)
        run.loop.save()
        if process.is_main:
            run.conclude()
        return Ended(claimed.run.folder, run.hand_over(), run.loop.is_complete, process.stop.exit_code)


def look(config: RunConfig) -> ContactSheet:
    """A few samples of the run of a configuration, drawn and scored; in a folder that does not stay, and nothing is
    trained."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)), "run")
        alone = config.model_copy(update={"output": str(place), "trackers": ()})
        return _opened(stack, alone)[2].look()


def _opened(
    stack: ExitStack, config: RunConfig, resume: Path | None = None, script: Script | None = None
) -> tuple[Claim, Process, TrainingRun[Any]]:
    """A run as of `run`, restored where it goes on; the stack closes it."""
    # Missing packages are told first: they cost no time to find, and would otherwise end the run after the model is
    # loaded.
    check_trackers(config.trackers)
    check_optimizer(config.optimizer)
    kind = kind_of(config)
    for method in methods_of(config):
        code_of(method)  # told here where one is incomplete
    accelerator = make_accelerator(config.distributed.timeout_s)
    kind.check_processes(config, accelerator.num_processes)
    set_seed(config.seed)  # the global generators too: loading may draw from them
    stack.enter_context(tolerant_streams())
    stack.enter_context(tf32(config.tf32))
    # The folder is claimed before the slow part, so that a second start into it fails at once and not minutes later.
    claimed = claim(stack, config.output, resume, accelerator)
    stack.enter_context(_naming_killed(claimed.run, accelerator.num_processes))
    # Before anything is written, so that a start which fails here leaves nothing behind.
    prepared = kind.prepare(config, accelerator)
    with unchanged_where_refused(claimed.run, resumes=claimed.resumes and accelerator.is_main_process):
        process = begin(stack, claimed, config, accelerator, unit=kind.unit, script=script)
        run = kind.open(config, process, prepared, stack)
        if claimed.last_checkpoint:
            run.loop.restore(claimed.last_checkpoint)
    return claimed, process, run


@contextmanager
def _naming_killed(run: Run, processes: int) -> Iterator[None]:
    """Say which process was killed, where the others can no longer speak to each other for that, and how to go on."""
    try:
        yield
    except RuntimeError as error:
        # A lost peer comes as a plain RuntimeError of torch, in the words of whichever transport noticed: only its text
        # tells it from others. ("onnection": torch writes it with either initial.)
        speechless = processes > 1 and any(word in str(error) for word in ("onnection", "NCCL", "gloo"))
        killed = killed_ranks(run, processes, patience_s=2.0) if speechless else []
        if not killed:
            raise
        newest = checkpoint.latest(run.checkpoints)
        how = "No checkpoint was saved."
        if newest is not None:
            how = f"Go on from {newest.name}: {command('resume', run.folder, '--nproc', processes)}"
        raise RuntimeError(f"killed: {', '.join(killed)}. The other ranks stop. {how}") from error


@contextmanager
def saved_on_error(loop: Loop) -> Iterator[None]:
    """Save the iterations that are finished before an error that ends the block goes on, as where a signal does.

    Of several processes only where all end by it together: a save is written by all of them.
    """
    try:
        yield
    except Exception as error:
        # A checkpoint that could not be written or read will not be the second time either.
        alone = loop.process.accelerator.num_processes == 1
        tries = not isinstance(error, checkpoint.CheckpointError) and (alone or isinstance(error, StoppedTogether))
        if tries and loop.iteration and loop.can_be_left:
            _save_finished(loop)
        raise


def _save_finished(loop: Loop) -> None:
    # The last checkpoint is of this very moment.
    if loop.saved == loop.iteration and not loop.outdated:
        return
    try:
        loop.undo()
        loop.save()
    except (RuntimeError, OSError, ValueError) as error:  # the one that ends the run is to be read
        logger.warning("the finished iterations could not be saved: %s", error)
        return
    loop.process.progress.say(f"{loop.iteration} finished iterations are saved")


def _train(run: TrainingRun[Any], memory_hint: str) -> None:
    """The run's method, and in a run in stages the next ones'."""
    loop = run.loop
    while True:
        first = loop.iteration
        try:
            settings = run.settings
            code_of(settings).train(run, settings)
            # A method that came back without an iteration was asked to end: calling it again would go on for ever.
            if loop.iteration == first or loop.iteration not in loop.ends or loop.is_complete:
                return
            continue
        except Interrupted:
            loop.undo()
            logger.info("the running iteration is done again on resume")
            return
        except torch.OutOfMemoryError as error:
            size = loop.trained.micro_batch_sizes()[0]
            error.add_note(f"micro-batches of {size} samples do not fit: {memory_hint}")
            raise
        except MemoryRanOut:
            pass  # until here the error holds what did not fit
        loop.undo()
        shrink(loop, memory_hint)


def shrink(loop: Loop, memory_hint: str) -> None:
    """Smaller micro-batches, in all processes, after memory ran out in an iteration that was undone. It is sampled and
    trained anew: replayed in pieces of what sampling did as one, ratios would be off 1.

    Raises RuntimeError where there is no smaller one.
    """
    # What did not fit may hang in cycles, until whose end the device keeps it.
    gc.collect()
    # Gradients of a half-done update belong to micro-batches that are cut anew.
    loop.optimizer.zero_grad(set_to_none=True)
    empty_cache(loop.process.accelerator.device)
    was, *smaller = loop.trained.micro_batch_sizes()
    if not smaller:
        raise too_large(was, memory_hint)
    loop.memory["batch_size"] = smaller[0]
    loop.trained.resize(smaller[0])
    loop.process.progress.say(
        f"memory ran out in iteration {loop.iteration + 1} with {was} samples in a micro-batch: it is done again, "
        f"with {smaller[0]} from here on"
    )


def halvings(most: int, multiple: int = 1) -> list[int]:
    """most and, each half of the one before in whole multiples, the smaller ones: 12, 6, 3, 1."""
    sizes = [most]
    while sizes[-1] >= 2 * multiple:
        sizes.append(sizes[-1] // multiple // 2 * multiple)
    return sizes


def too_large(size: int, memory_hint: str) -> RuntimeError:
    """The error where not even the smallest micro-batch fits."""
    return RuntimeError(f"a micro-batch of {size} samples does not fit into the device's memory: {memory_hint}")


def say_result(
    loop: Loop,
    rows: Sequence[Mapping[str, float]],
    metric: str,
    *,
    label: str,
    pictures: str,
    result: str,
    best: Path | None = None,
    write: Callable[[Path, int], object] = lambda place, step: None,
) -> None:
    """What the evaluations of `eval/<metric>_mean` came to (`rows` of metrics), where the report is, and the result, or
    how to go on. best: where that of the best evaluation is written beside it, by `write(place, step)`; None = nowhere,
    it is exported by hand."""
    run, say = loop.process.run, loop.process.progress.say
    # Runs that were begun without held-out prompts have rows without the figure.
    evaluated = [row for row in rows if row.get(f"eval/{metric}_mean") is not None]
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        before, after = first[f"eval/{metric}_mean"], last[f"eval/{metric}_mean"]
        interval = ""
        if last.get(f"eval/{metric}_low") is not None:
            interval = f" ({last[f'eval/{metric}_low']:.3f} to {last[f'eval/{metric}_high']:.3f})"
        say(f"{label}: {before:.3f} before, {after:.3f}{interval} after {last['step']} iterations")
    say(f"{pictures}: {write_report(run.folder)}")
    if loop.is_complete:
        say(result)
        say(_best_said(loop, best, write, lower=not evaluated or evaluated[-1].get("eval/below_best", 0.0) > 0))
    else:
        how = f"genrl.resume({str(run.folder)!r}, ...)" if loop.process.in_script else command("resume", run.folder)
        say(f"stopped after {loop.iteration} of {loop.config.iterations} iterations; go on: {how}")


def _best_said(loop: Loop, place: Path | None, write: Callable[[Path, int], object], *, lower: bool) -> str:
    """Write the model of the best evaluation beside the last; what to say of the two. lower: the last evaluation is
    worse; else it is better by less than noise."""
    step = collapse.best(loop)
    if step == loop.iteration:
        return "this is the last iteration, and the best"
    if step is None:
        return "this is the last iteration; no other was measured that could be better"
    if step == 0:
        return "this is the last iteration; no evaluation was better than one before training by more than noise"
    if place is not None:
        with whole_folder(place) as temporary:
            write(temporary, step)
    where = command("export", loop.process.run.folder, "--best") if place is None else str(place)
    score = f"{collapse.best_score(loop):.3f}{'' if lower else '; the last is better, within noise'}"
    best = f"the best by more than noise is {step} ({score}): {where}"
    return f"this is the last iteration; {best}; `--best` of export, sample, eval and compare takes it"
