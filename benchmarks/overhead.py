"""Overhead: an iteration of a trainer over the bare forward and backward passes that it contains.

    python -m benchmarks.overhead [configs/quickstart.yaml ...] [--iterations 3]

Runs a few iterations of a configuration on the CPU (or the device at hand) and records every call of the denoiser and
of the decoder. Then the same calls, with the same arguments, are made in a bare loop: forward without gradient where
it had none, forward and backward where it had. Prints, per phase, seconds of the iteration, seconds of the bare calls
and their ratio, and writes benchmarks/results/overhead.json. Rewards, evaluation and saving are not part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from genrl.config import Config, FlowGRPO, load
from genrl.diffusion import diffusion_nft, flow_grpo
from genrl.diffusion.session import Session
from genrl.diffusion.train import open_session
from genrl.runtime import run as run_folder
from genrl.runtime.loop import make_accelerator
from genrl.runtime.progress import Progress
from genrl.runtime.signals import Stop, Watchdog

Call = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], bool]


def measure(config: Config) -> dict[str, float]:
    """Seconds per iteration (median over the iterations after the first) of each phase and of its bare calls."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_folder.Run(Path(folder) / "run")
        accelerator = make_accelerator(config.distributed.timeout_s)
        with Watchdog(run, 600) as watchdog:
            session = open_session(config, accelerator, run, Progress(1, enabled=False), watchdog, Stop())
            calls: list[Call] = []
            rows = run_iterations(session, calls)
            session.log.finish()
            bare = [bare_seconds(calls) for _ in range(3)]
    found = {phase: statistics.median(row[phase] for row in rows[1:]) for phase in ("sample", "decode", "train")}
    return found | {f"bare_{phase}": statistics.median(b[phase] for b in bare) for phase in bare[0]}


def run_iterations(session: Session, calls: list[Call]) -> list[dict[str, float]]:
    """Run the trainer; `calls` holds the model calls of the last iteration."""
    rows: list[dict[str, float]] = []
    handles = []
    finish = session.finish

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, args, kwargs, torch.is_grad_enabled()))

    def finished(metrics: Any) -> None:
        finish(metrics)
        rows.append(dict(session.timings))
        if session.iteration == session.config.iterations - 1:  # the last one is recorded, and not timed
            modules = [*session.policy.denoisers.values(), session.policy.pipe.vae.decoder]
            handles.extend(m.register_forward_pre_hook(record, with_kwargs=True) for m in modules)

    session.finish = finished  # type: ignore[method-assign]
    settings = session.config.trainer
    if isinstance(settings, FlowGRPO):
        flow_grpo.train(session, settings)
    else:
        diffusion_nft.train(session, settings)
    for handle in handles:
        handle.remove()
    return rows[:-1]


def bare_seconds(calls: list[Call]) -> dict[str, float]:
    """The recorded calls, once more: sampling (denoiser), decoding, training (from the last decoding on)."""
    first_backward = next(i for i, call in enumerate(calls) if call[3])
    denoiser = calls[first_backward][0]
    # without gradients between two training passes: the old policy and the reference belong to training
    start_of_training = (
        max((i for i in range(first_backward) if calls[i][0] is not denoiser), default=first_backward - 1) + 1
    )
    spent = {"sample": 0.0, "decode": 0.0, "train": 0.0}
    for i, (module, args, kwargs, grad) in enumerate(calls):
        phase = "decode" if module is not denoiser else "train" if i >= start_of_training else "sample"
        started = time.perf_counter()
        with nullcontext() if grad else torch.no_grad():
            output = module(*args, **kwargs)
        if grad:
            (output[0] if isinstance(output, tuple) else output).float().sum().backward()
        spent[phase] += time.perf_counter() - started
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=["configs/quickstart.yaml", "configs/flow_grpo.yaml"])
    parser.add_argument("--iterations", type=int, default=4)
    arguments = parser.parse_args()
    table = {}
    for path in arguments.configs:
        config = load(path, [f"iterations={arguments.iterations + 1}", "evaluation.every=0", "trackers=[]"])
        found = measure(config)
        print(f"\n{path}\n{'phase':<10}{'iteration':>12}{'bare calls':>12}{'ratio':>8}")
        for phase in ("sample", "decode", "train"):
            ratio = found[phase] / found[f"bare_{phase}"]
            print(f"{phase:<10}{found[phase]:>10.2f} s{found[f'bare_{phase}']:>10.2f} s{ratio:>8.2f}")
        whole = sum(found[p] for p in ("sample", "decode", "train"))
        bare = sum(found[f"bare_{p}"] for p in ("sample", "decode", "train"))
        print(f"{'all':<10}{whole:>10.2f} s{bare:>10.2f} s{whole / bare:>8.2f}")
        table[path] = found | {"ratio": whole / bare, "threads": torch.get_num_threads()}
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "overhead.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
