"""End to end on the embedded model: pictures per second, scorer calls per second, and reward gained per minute.

    python -m benchmarks.end_to_end [--minutes 5] [--seeds 0 1 2] [--only "window of 3" DiffusionNFT]

Every row is a trainer from its YAML. All of them train in one process and take turns, iteration by iteration, until
each has had as many minutes of the processor. The first iteration of each is a warm-up, in no rate. Per row:

- pictures per second: those of an iteration / the median seconds of one (rollout, decoding, scoring, update; neither
  evaluation nor saving);
- scorer calls per second: pictures scored / seconds in which the trainer waited for scores; and the share of these in
  an iteration;
- model calls per picture, sampling + training, as counted;
- reward gained per minute: held-out reward after - before, over all minutes trained (the warm-up too). Before and after
  are the same prompts from the same noise. It takes minutes to rise above the noise of a few hundred pictures: 90 in
  all by default; with less the rates are good, and this is not.

A second table has the same of the stored runs of `benchmarks.claims`, to the end of their configurations with three
seeds, evaluation and loading included in their minutes; there is a second scorer, which was not trained on.
Prints the tables (means over the seeds) and writes end_to_end.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any

from benchmarks.claims import stored
from benchmarks.common import Parts, Seconds, Turns, opened, parser, save, train
from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.evaluate import evaluate_held_out
from genrl.diffusion.rollout.rollout import Worker
from genrl.diffusion.run import DiffusionRun

FLOW = "configs/flow_grpo.yaml"
ROWS: dict[str, tuple[str, ...]] = {
    "chain, all steps": (FLOW, "trainer.window=null"),
    "window of 3": (FLOW,),
    "window of 3, graphs kept": (FLOW, "trainer.keep_graph=true"),
    "prefix tree": (FLOW, "trainer.tree={ways: 12, at: window_start}"),
    "window tree": (FLOW, "trainer.window={size: 2, high: 5}", "trainer.tree={ways: 2, at: window}"),
    "DiffusionNFT": ("configs/diffusion/diffusion_nft.yaml", "rewards=[{name: shapes}]"),
}
"""Name -> file and changes."""
OFF = ("evaluation.every=0", "checkpoint.every=1000000", "trackers=[]", "iterations=100000")


class Row:
    """One trainer, an iteration at a time."""

    def __init__(self, name: str, seed: int, changes: Sequence[str], stack: ExitStack) -> None:
        path, *own = ROWS[name]
        config = load(path, [*OFF, f"seed={seed}", *own, *changes])
        assert isinstance(config, Config)
        self.run, self.parts = opened(config, stack), Parts()
        self.spent: list[Seconds] = []
        self.scoring: list[Seconds] = []
        self.calls: list[tuple[float, float]] = []
        self.reward = [held_out(self.run)]
        log, timed = self.run.loop.process.log.log, self.run.loop.timed

        def logged(step: int, row: dict[str, float]) -> None:
            self.calls.append((row["model_calls/sample"], row["model_calls/train"]))
            log(step, row)

        def in_part(phase: str) -> Any:
            return self.parts.part(phase) if phase == "score" else timed(phase)

        self.run.loop.process.log.log, self.run.loop.timed = logged, in_part  # type: ignore[method-assign]
        self.turns = Turns(partial(_loop, self.run))
        stack.callback(self.turns.close)

    @property
    def minutes(self) -> float:
        """Of the processor, trained so far."""
        return sum(one.cpu for one in self.spent) / 60

    def step(self) -> None:
        self.parts.take()
        self.turns.next()
        by_part = {part: seconds for (_, part), seconds in self.parts.take().items()}
        self.scoring.append(by_part["score"])
        self.spent.append(Seconds(sum(s.wall for s in by_part.values()), sum(s.cpu for s in by_part.values())))


def _loop(run: DiffusionRun, wait: Callable[[], None]) -> None:
    """The trainer's loop; `wait` is called after every iteration."""
    finish = run.finish

    def finished(metrics: Any) -> None:
        finish(metrics)
        wait()

    run.finish = finished  # type: ignore[method-assign]
    train(run)


def held_out(run: DiffusionRun) -> float:
    """Mean reward of the held-out prompts under the present weights."""
    with run.loop.averaged(), run.policy.uncounted():
        evaluation = evaluate_held_out(run.config, run.policy, run.eval_prompts, run.scorers, Worker())
    return evaluation.metrics["eval/total_mean"]


def measure(seed: int, names: Sequence[str], minutes: float, changes: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Row -> what it came to with this seed."""
    with ExitStack() as stack:
        rows = {name: Row(name, seed, changes, stack) for name in names}
        while left := [row for row in rows.values() if len(row.spent) < 2 or row.minutes < minutes]:
            for row in left:
                row.step()
        results = {}
        for name, row in rows.items():
            row.reward.append(held_out(row.run))
            results[name] = summary(row)
        return results


def summary(row: Row) -> dict[str, Any]:
    pictures, own = row.run.config.sampling.images_per_iteration, row.spent[1:]
    return {
        "seed": row.run.config.seed,
        "iterations": len(row.spent),
        "pictures": pictures,
        "held_out_pictures": len(row.run.eval_prompts),
        "iteration_cpu_s": [one.cpu for one in row.spent],
        "iteration_wall_s": [one.wall for one in row.spent],
        "pictures_per_cpu_s": pictures / median(one.cpu for one in own),
        "pictures_per_wall_s": pictures / median(one.wall for one in own),
        "scorer_calls_per_cpu_s": pictures / median(one.cpu for one in row.scoring[1:]),
        "scorer_share": median(s.cpu / whole.cpu for s, whole in zip(row.scoring[1:], own, strict=True)),
        "calls_per_picture": [mean(one[k] for one in row.calls) / pictures for k in (0, 1)],
        "reward": row.reward,
        "cpu_minutes": row.minutes,
        "gain_per_cpu_minute": (row.reward[-1] - row.reward[0]) / row.minutes,
    }


def whole_runs(runs: dict[str, dict[str, Any]], trained: str = "shapes") -> dict[str, list[list[float]]]:
    """Of each method that trained on this scorer: for every seed reward gained per CPU minute, by it and by the second.

    runs: name and seed -> run, as in benchmarks/runs.
    """
    by_method: dict[str, list[list[float]]] = {}
    for key, run in sorted(runs.items()):
        if run.get("trained") == [trained] and run.get("cpu_s"):
            scorers = (trained, *run["logged"][:1])
            curves = [stored.points(run, f"eval/{scorer}_mean", "kcalls") for scorer in scorers]
            gains = [60 * (curve[-1][1] - curve[0][1]) / run["cpu_s"] for curve in curves]
            by_method.setdefault(key.rpartition("-")[0].rpartition("/")[2], []).append(gains)
    return by_method


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=5.0, help="of the processor, for each row and seed")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    arguments.add_argument(
        "--set", nargs="+", default=["evaluation.group_size=2"], metavar="KEY=VALUE", help="changes to all rows"
    )
    given = arguments.parse_args()
    runs, whole = [], whole_runs({key: run for key, run in stored.read().items() if key.startswith("pipelines/")})
    for seed in given.seeds:
        runs.append(measure(seed, given.only, given.minutes, given.set))
        save(given.out, "end_to_end", {"runs": runs, "whole_runs": whole})
    print(
        "| trainer | calls per picture | pictures per CPU s | times the first | scorer calls per CPU s, share of time "
        "| reward before, after | gained per CPU minute (each seed) |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in given.only:
        rows = [run[name] for run in runs]
        speed = [row["pictures_per_cpu_s"] for row in rows]
        ratios = [run[name]["pictures_per_cpu_s"] / run[given.only[0]]["pictures_per_cpu_s"] for run in runs]
        sampling, training = (mean(row["calls_per_picture"][k] for row in rows) for k in (0, 1))
        before, after = (mean(row["reward"][k] for row in rows) for k in (0, 1))
        gains = [row["gain_per_cpu_minute"] for row in rows]
        print(
            f"| {name} | {sampling:.2f} + {training:.2f} | {mean(speed):.1f} | {mean(ratios):.2f} "
            f"| {mean(row['scorer_calls_per_cpu_s'] for row in rows):,.0f}, "
            f"{mean(row['scorer_share'] for row in rows):.1%} | {before:.3f}, {after:.3f} "
            f"| {mean(gains):+.3f} ({', '.join(f'{gain:+.3f}' for gain in gains)}) |"
        )
    print("\n| whole run | gained per CPU minute (each seed) | by the second scorer |\n| --- | --- | --- |")
    for name, seeds in sorted(whole.items(), key=lambda row: -mean(gains[0] for gains in row[1])):
        each = [", ".join(f"{gains[k]:+.3f}" for gains in seeds if len(gains) > k) for k in (0, 1)]
        print(f"| {name} | {each[0]} | {each[1]} |")


if __name__ == "__main__":
    main()
