"""Overhead: an iteration of a trainer over the bare forward and backward passes that it contains.

    python -m benchmarks.overhead [configs/quickstart.yaml ...] [--rounds 5]

After every iteration the very calls that it made of denoiser and decoder, with the same arguments, are made again in a
bare loop: forward without gradient where it had none, forward and backward where it had. So both take turns on one
machine, and the ratio is the median over the rounds of that of neighbours (the first round is a warm-up). Seconds are
the processor's, since the machine may do other things; the ratio by the wall clock stands beside. The second table says
where the rest of an iteration goes. Rewards are in it and in no ratio; evaluation and saving are in neither.
Writes overhead.json.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from benchmarks.common import Parts, Seconds, clock, opened, parser, save, train
from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.run import DiffusionRun

PHASES = ("sample", "decode", "train")
MODEL = ("forward", "backward")
"""What the bare loop does too."""
BESIDE = {
    "pipeline": "pipeline calls around the denoiser (diffusers' loop, guidance, packing)",
    "transition": "transitions, noise and log-probabilities in sampling",
    "gradient": "gradients summed, measured and clipped",
    "optimizer": "optimiser step",
    "the rest": "batches, losses, replayed log-probabilities, metrics",
}
"""Part -> what it is."""
Call = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], bool]


def measure(config: Config) -> dict[str, Any]:
    """Of the rounds after the first, the medians: seconds by phase, of the iteration and of the bare calls, and the
    ratio; seconds by part; and every round."""
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        run = opened(config, stack)
        parts, calls = Parts(), []
        instrument(run, parts, calls)
        finish = run.finish

        def finished(metrics: Any) -> None:
            parts.enter("finish")
            finish(metrics)
            spent = parts.take()
            rounds.append({"spent": spent, "bare": bare(calls)})
            run.loop.optimizer.zero_grad(set_to_none=True)
            calls.clear()
            parts.take()
            parts.enter("before")

        run.finish = finished  # type: ignore[method-assign]
        train(run)
    return summary(rounds[1:])


def instrument(run: DiffusionRun, parts: Parts, calls: list[tuple[str, Call]]) -> None:
    """Say to `parts` which phase runs, and what in it; `calls` gets those of denoiser and decoder, with their phase."""
    policy, take, timed = run.policy, run.take, run.loop.timed

    @contextmanager
    def in_phase(phase: str) -> Iterator[None]:
        outside = parts.phase
        parts.enter(phase)
        with timed(phase):
            yield
        parts.enter(outside)

    def taken(rollouts: Any) -> Any:
        result = take(rollouts)
        parts.enter("train")
        return result

    run.loop.timed, run.take = in_phase, taken  # type: ignore[method-assign]
    for module in (*policy.denoisers.values(), policy.pipe.vae.decoder):
        record(module, parts, calls)
        parts.wrap(module, "forward", "forward")
    for method in ("roll_out", "replay", "velocity", "decode"):
        parts.wrap(policy, method, "pipeline")
    parts.wrap(policy.head, "step", "transition")
    parts.wrap(run.loop.optimization, "backward", "backward")
    parts.wrap(run.loop.optimization, "step", "gradient")
    parts.wrap(run.loop.optimizer, "step", "optimizer")


def record(module: torch.nn.Module, parts: Parts, calls: list[tuple[str, Call]]) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if parts.phase in PHASES:
            calls.append((parts.phase, (forward, args, kwargs, torch.is_grad_enabled())))
        return forward(*args, **kwargs)

    module.forward = recorded  # type: ignore[method-assign]


def bare(calls: list[tuple[str, Call]]) -> dict[str, Seconds]:
    """Seconds of the recorded calls, once more, by phase."""
    spent = dict.fromkeys(PHASES, Seconds(0.0, 0.0))
    for phase, (forward, args, kwargs, grad) in calls:
        started = clock()
        with nullcontext() if grad else torch.no_grad():
            output = forward(*args, **kwargs)
        if grad:
            (output[0] if isinstance(output, tuple) else output).float().sum().backward()
        passed = clock() - started
        spent[phase] = Seconds(spent[phase].wall + passed.wall, spent[phase].cpu + passed.cpu)
    return spent


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    medians: dict[str, Any] = {phase: over_phases(rounds, (phase,)) for phase in PHASES}
    medians["all"] = over_phases(rounds, PHASES)
    keys = {key for one in rounds for key in one["spent"]}
    spent = {key: median(one["spent"].get(key, Seconds(0.0, 0.0)).cpu for one in rounds) for key in sorted(keys)}
    parts = dict.fromkeys((*MODEL, *BESIDE, "score", "outside"), 0.0)
    for (phase, part), seconds in spent.items():
        parts[part if phase in PHASES else "score" if phase == "score" else "outside"] += seconds
    return medians | {"parts": parts, "by_phase": {f"{phase}: {part}": s for (phase, part), s in spent.items()}}


def over_phases(rounds: list[dict[str, Any]], phases: tuple[str, ...]) -> dict[str, Any]:
    """Of these phases together: seconds of the iteration and of its bare calls, medians, and their ratios."""

    def whole(one: dict[str, Any]) -> Seconds:
        spent = [seconds for (phase, _), seconds in one["spent"].items() if phase in phases]
        return Seconds(sum(s.wall for s in spent), sum(s.cpu for s in spent))

    def bare_of(one: dict[str, Any]) -> Seconds:
        return Seconds(sum(one["bare"][p].wall for p in phases), sum(one["bare"][p].cpu for p in phases))

    pairs = [(whole(one), bare_of(one)) for one in rounds]
    ratios = [iteration.cpu / calls.cpu for iteration, calls in pairs]
    return {
        "iteration_s": median(iteration.cpu for iteration, _ in pairs),
        "bare_s": median(calls.cpu for _, calls in pairs),
        "ratio": median(ratios),
        "ratios": ratios,
        "wall_ratio": median(iteration.wall / calls.wall for iteration, calls in pairs),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("configs", nargs="*", default=["configs/quickstart.yaml", "configs/flow_grpo.yaml"])
    arguments.add_argument("--rounds", type=int, default=5, help="after the first; default: 5")
    arguments.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the configurations")
    given = arguments.parse_args()
    table = {}
    for path in given.configs:
        off = ("evaluation.every=0", "checkpoint.every=1000000", "trackers=[]")
        config = load(path, [f"iterations={given.rounds + 1}", *off, *given.set])
        assert isinstance(config, Config)
        result = table[path] = measure(config)
        print(f"\n{path}\n| phase | iteration, CPU s | bare calls, CPU s | ratio (range) | by the wall clock |")
        print("| --- | --- | --- | --- | --- |")
        for phase in (*PHASES, "all"):
            row = result[phase]
            print(
                f"| {phase} | {row['iteration_s']:.2f} | {row['bare_s']:.2f} | {row['ratio']:.2f} "
                f"({min(row['ratios']):.2f} to {max(row['ratios']):.2f}) | {row['wall_ratio']:.2f} |"
            )
        whole = result["all"]["iteration_s"]
        print("\n| of an iteration | CPU s | per cent |\n| --- | --- | --- |")
        names = {part: f"denoiser and decoder, {part}" for part in MODEL} | BESIDE
        names |= {"score": "rewards", "outside": "logging, copies to go back to"}
        for part, name in names.items():
            print(f"| {name} | {result['parts'][part]:.3f} | {100 * result['parts'][part] / whole:.1f} |")
    save(given.out, "overhead", table)


if __name__ == "__main__":
    main()
