"""The denoiser of the embedded model compiled (`kernels.compile: true`) against eager, in sampling and in training.

    python -m benchmarks.compiled --rounds 7

Both take turns in one process; compilation is told apart. Written to benchmarks/results/compiled.json.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import clock, parser, save
from genrl.config import LoRA
from genrl.diffusion.config.sections import Model
from genrl.diffusion.policy.adapters import trainable
from genrl.diffusion.policy.compiling import compile_denoisers
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel, Trajectory

TINY = Path(__file__).parents[1] / "assets" / "tiny-t2i"
STEPS = 4
Forwards = dict[str, dict[str, Callable[..., Any]]]
"""By mode, the forward pass of each denoiser."""


def sampled(policy: Policy, batch: Batch) -> Trajectory:
    with torch.no_grad():
        return policy.roll_out(batch, Kernel("flow_sde", 0.7), range(STEPS - 1))


def trained(policy: Policy, recorded: Trajectory) -> None:
    for i in recorded.log_probs:
        policy.replay(recorded.step(i)).log_prob.sum().backward()


def measured(policy: Policy, forwards: Forwards, size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """CPU seconds by phase and mode. The first calls compile and are not among them."""
    batch = Batch(
        ["a red star"] * size, [(0, k) for k in range(size)], {"num_inference_steps": STEPS, "guidance_scale": 4.5}
    )
    recorded = sampled(policy, batch)
    trained(policy, recorded)
    phases = {
        "sampling": functools.partial(sampled, policy, batch),
        "training": functools.partial(trained, policy, recorded),
    }
    seconds: dict[str, dict[str, list[float]]] = {phase: {mode: [] for mode in forwards} for phase in phases}
    for turn in range(rounds + 1):  # the first warms up
        for mode, one in forwards.items():
            for name, denoiser in policy.denoisers.items():
                denoiser.forward = one[name]
            for phase, work in phases.items():
                began = clock()
                work()
                if turn:
                    seconds[phase][mode].append((clock() - began).cpu)
    return seconds


def main() -> None:
    of = parser(__doc__)
    of.add_argument("--rounds", type=int, default=7, help="of turns; default: 7")
    of.add_argument("--sizes", type=int, nargs="+", default=[1, 8], help="pictures at a time; default: 1 8")
    given = of.parse_args()
    policy = Policy(load_pipeline(Model(path=str(TINY))))
    trainable(policy.denoisers, LoRA())
    forwards = {"eager": {name: denoiser.forward for name, denoiser in policy.denoisers.items()}}
    compile_denoisers(policy.denoisers.values(), say=print)
    forwards["compiled"] = {name: denoiser.forward for name, denoiser in policy.denoisers.items()}
    results = {}
    for size in given.sizes:
        results[size] = measured(policy, forwards, size, given.rounds)
        for phase, seconds in results[size].items():
            ratios = sorted(one / other for one, other in zip(seconds["eager"], seconds["compiled"], strict=True))
            times = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times faster compiled"
            print(f"{size} pictures, {phase}: {times}", flush=True)
    save(given.out, "compiled", results)


if __name__ == "__main__":
    main()
