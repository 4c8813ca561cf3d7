"""Peak memory of an iteration, exact to the byte, over what the formulas say it is.

    python -m benchmarks.memory [--models embedded wide] [--only LoRA "LoRA, graphs kept"]

Every allocation of torch's allocator is recorded during an iteration (the second: the optimiser's states are there), on
top of what was there before, weights included; so a peak is that of all tensors, the kernels' own buffers too, and
neither Python nor other libraries. Beside it stand

- `formula`: the sum that `genrl check` prints (`genrl.diffusion.config.memory_estimate`): weights, gradients, optimiser
  states, snapshots, and activations by kept numbers per token, layer and unit of width;
- `activations`: the peak in training without what is there between iterations and without gradients, over that part of
  the formula;
- `line`: what `sampling.fit_batch` would foresee for this batch, from two trials of 1 and 2 samples
  (`genrl.diffusion.before`), over the peak; below 1 it would allow batches that do not fit.

`embedded` is assets/tiny-t2i; `wide` the same pipeline with 8 random SD3 blocks of width 384 and 256 tokens. Writes
memory.json.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import opened, parser, save, train
from genrl.config import load
from genrl.diffusion import before
from genrl.diffusion.config.estimate import read_components
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.run import DiffusionRun

STEPS = ("sampling.num_inference_steps=3", "trainer.window={size: 2, high: 2}")
FLOW = ("configs/flow_grpo.yaml", "sampling.batch_size=32", *STEPS)
FULL = ("model.lora=null", "optimizer.lr=1e-5")
CHECKPOINTING = "model.gradient_checkpointing=true"
ROWS: dict[str, tuple[str, ...]] = {
    "LoRA": FLOW,
    "LoRA, graphs kept": (*FLOW, "trainer.keep_graph=true"),
    "LoRA, checkpointing": (*FLOW, CHECKPOINTING),
    "full": (*FLOW, *FULL),
    "full, graphs kept": (*FLOW, *FULL, "trainer.keep_graph=true"),
    "full, checkpointing": (*FLOW, *FULL, CHECKPOINTING),
}
"""Name -> file and changes."""
COMMON = ("iterations=2", "evaluation.every=0", "checkpoint.every=1000000", "trackers=[]")
MODELS: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "wide": (  # its pictures are noise, which no rule tells apart
        *("sampling.prompts_per_iteration=2", "sampling.group_size=2", "sampling.batch_size=2"),
        "rewards=[{name: jpeg}]",
    ),
}
"""Name -> changes for it."""
ACTIVATIONS = ("activations of one micro-batch (rough)", "activations kept from sampling (rough)")


class Trace:
    """Bytes allocated and freed while it is recorded, by time."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.marks: list[tuple[str, int]] = []

    def start(self) -> None:
        gc.collect()
        self.before = live_bytes()
        self._profile.start()

    def mark(self, phase: str) -> None:
        """From here on it is this phase."""
        self.marks.append((phase, time.time_ns()))

    def stop(self) -> None:
        self._profile.stop()

    def peaks(self) -> dict[str, int]:
        """Phase -> most bytes in use."""
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peaks, held, k = dict.fromkeys((name for name, _ in self.marks), 0), self.before, 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            while k + 1 < len(self.marks) and event.start_ns() >= self.marks[k + 1][1]:
                k += 1
                peaks[self.marks[k][0]] = max(peaks[self.marks[k][0]], held)
            held += event.nbytes()
            peaks[self.marks[k][0]] = max(peaks[self.marks[k][0]], held)
        return peaks


def live_bytes() -> int:
    """Of all tensors that Python knows (not a compiler's fake ones, nor wrappers of vmap), shared storages once."""
    storages, wrapped = {}, torch._C._functorch.is_functorch_wrapped_tensor
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type != "meta" and not wrapped(thing):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_of(work: Callable[[], object]) -> int:
    trace = Trace()
    trace.start()
    trace.mark("work")
    work()
    trace.stop()
    return trace.peaks()["work"]


def trial(run: DiffusionRun, size: int) -> int:
    """Peak bytes of what `sampling.fit_batch` tries with so many samples."""
    peak = peak_of(lambda: before.attempt(run, run.prompts, size))
    run.loop.optimizer.zero_grad(set_to_none=True)
    return peak


def iteration_peaks(run: DiffusionRun) -> tuple[dict[str, int], int]:
    """Peak bytes of the second iteration's phases, and what was there before it."""
    trace, finish, take = Trace(), run.finish, run.take

    def finished(metrics: Any) -> None:
        finish(metrics)
        if run.iteration == 1:
            trace.start()
            trace.mark("rollout")
        else:
            trace.stop()

    def taken(rollouts: Any) -> Any:
        if run.iteration == 1:
            trace.mark("training")
        return take(rollouts)

    run.finish, run.take = finished, taken  # type: ignore[method-assign]
    train(run)
    return trace.peaks(), trace.before


def measure(changes: Sequence[str], row: str, path: str) -> dict[str, Any]:
    """Bytes of one row for the pipeline in the folder `path`."""
    file, *own = ROWS[row]
    config = load(file, [*COMMON, *own, *changes, f"model.path={path}"])
    assert isinstance(config, Config)
    parts = dict(memory(config, read_components(Path(path))))
    with ExitStack() as stack:
        run = opened(config, stack)
        one, two = (trial(run, n) for n in (1, 2))
        peaks, before = iteration_peaks(run)
        gradients = sum(4 * p.numel() for p in run.weights.parameters)
        batch = config.sampling.batch_size
    activations = next(parts[name] for name in ACTIVATIONS if name in parts)
    most, kept = max(peaks.values()), config.trainer.calls(config, lambda scale: 1).kept
    return {
        "rollout": peaks["rollout"],
        "training": peaks["training"],
        "between_iterations": before,
        "formula": sum(parts.values()),
        "parts": parts,
        "over_formula": most / sum(parts.values()),
        "activations_over_formula": (most - before - gradients) / activations,
        "line_over_peak": None if kept else (one + (batch - 1) * (two - one)) / most,
    }


def write_wide(folder: str) -> None:
    """The embedded pipeline with a random denoiser of another size."""
    config = load(FLOW[0])
    assert isinstance(config, Config)
    pipe = load_pipeline(config.model)
    torch.manual_seed(0)
    size = {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 8, "caption_projection_dim": 384}
    grid = {"sample_size": 32, "pos_embed_max_size": 16}
    pipe.transformer = SD3Transformer2DModel.from_config({**pipe.transformer.config, **size, **grid})
    pipe.save_pretrained(folder)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    given = arguments.parse_args()
    results: dict[str, Any] = {}
    print("| model, training | rollout, MB | training, MB | formula, MB | peak over it | activations | line |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in given.models:
        with TemporaryDirectory() as folder:
            if model == "wide":
                write_wide(folder)
            path = folder if model == "wide" else "assets/tiny-t2i"
            for name in given.only:
                row = results[f"{model}, {name}"] = measure(MODELS[model], name, path)
                line = "-" if row["line_over_peak"] is None else f"{row['line_over_peak']:.2f}"
                print(
                    f"| {model}, {name} | {row['rollout'] / 1e6:.1f} | {row['training'] / 1e6:.1f} "
                    f"| {row['formula'] / 1e6:.1f} | {row['over_formula']:.2f} "
                    f"| {row['activations_over_formula']:.2f} | {line} |",
                    flush=True,
                )
    save(given.out, "memory", results)


if __name__ == "__main__":
    main()
