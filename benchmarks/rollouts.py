"""Chains, windows, trees and B2-style branches on the embedded task, at equal model calls: a table and a plot.

    python -m benchmarks.rollouts train runs/rollouts                      # every setting and seed that is not done yet
    python -m benchmarks.rollouts train runs/rollouts --settings prefix_tree --seeds 0
    python -m benchmarks.rollouts train runs/slow --changes optimizer.lr=1e-3
    python -m benchmarks.rollouts overhead                                 # benchmarks/results/rollouts_overhead.json
    python -m benchmarks.rollouts report runs/rollouts docs/img/rollouts.svg
    python -m benchmarks.rollouts tune runs/tuned --rates 1e-3 3e-3 6e-3 --noises 0.4 1.0   # seed 0 chooses, then 1, 2
    python -m benchmarks.rollouts tuned                                    # benchmarks/results/rollouts_tuned.json

Every setting is configs/flow_grpo.yaml with the changes in COMMON and SETTINGS: same model, prompts, pictures per
group, learning rate and clip range. The budget is in forward-equivalents: model calls of sampling, and 3 for each call
of training, since a backward pass costs about two forward passes. A run gets as many iterations as fit into it by the
closed form of its sampling plans (`genrl.mdp.plan`); the table has what was counted while it ran. Evaluation is not in
the budget.

`train` can be stopped and started again: finished runs are skipped, begun ones resumed. After a run its final weights
draw pictures for held-out prompts (`measure`), into measured.json of the run folder. `report` reads run folders and
the overhead's results alone, prints Markdown and writes the figure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch

import genrl_rewards
from benchmarks.diversity import PICTURES, distance
from genrl.config import load
from genrl.data import prompts as prompt_files
from genrl.diffusion import train as trainer
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.adapters import load_lora
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Samples, roll_out
from genrl.diffusion.rollout.rollout import call_arguments
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.settings import PolicyGradient
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run, read_metrics, write_atomic
from genrl.runtime.loop.process import lock
from genrl.runtime.show.curves import chart

BASE = "configs/flow_grpo.yaml"
COMMON = (
    "sampling.num_inference_steps=5",  # as the paper: few steps in training, more in evaluation
    "evaluation.num_inference_steps=8",
    "sampling.batch_size=96",
    "trainer.window={size: 2, high: 4}",
    "optimizer.lr=3e-3",
    "trackers=[]",
    "checkpoint.keep=1",
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "chain": ("trainer.window=null",),
    "window": (),
    "prefix_tree": ("trainer.tree={ways: 12, at: window_start}",),  # one root: all of the group share the prefix
    "window_tree": ("trainer.tree={ways: 2, at: window}",),  # four leaves below each of three roots
    "b2": (  # 3 to 4 of 5 steps, as 14 to 20 of 20 in the paper
        "trainer.window={size: 4, schedule: backward, shortest: 3}",
        "trainer.tree={ways: 4, at: window_start, contrast: true}",
        "trainer.noise_outside_window=true",
    ),
}
NAMES = {
    "chain": "chain, all steps",
    "window": "chain, window",
    "prefix_tree": "prefix tree",
    "window_tree": "window tree",
    "b2": "B²-style",
}
COLOURS = ("#475569", "#2563eb", "#d97706", "#059669", "#dc2626")
TRAINING_CALL = 3
"""Forward-equivalents of a model call in training: one forward and a backward of two."""
BUDGET = 45_000
"""Forward-equivalents of a run."""
EVALUATIONS = 5
"""During a run, besides the one before it."""
OVERHEAD = Path(__file__).parent / "results" / "rollouts_overhead.json"
NOISE = "-noise-"
"""Between a learning rate and a level of noise; without it the noise is that of `BASE`."""
TUNED = OVERHEAD.with_name("rollouts_tuned.json")


def stored(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def cost(config: Config) -> int:
    """Forward-equivalents of the whole run, in closed form. Pruned and contrasted edges may make it less."""
    assert isinstance(config.trainer, PolicyGradient)
    spent = 0
    for iteration in range(config.iterations):
        plan, trained, *_ = Steps.of(config, config.trainer, iteration)
        training = plan.training_calls(trained) * config.trainer.epochs
        spent += plan.calls + TRAINING_CALL * training
    return spent * config.sampling.prompts_per_iteration


def configured(setting: str, seed: int, budget: int, folder: Path, changes: Sequence[str] = ()) -> Config:
    """The run of a setting with as many iterations as the budget allows. Raises ValueError where it allows none."""

    def of(iterations: int) -> Config:
        every = max(1, round(iterations / EVALUATIONS))
        mine = (f"seed={seed}", f"output={folder / f'{setting}-{seed}'}", f"iterations={iterations}")
        saving = (f"evaluation.every={every}", f"checkpoint.every={every}")
        return load(BASE, [*COMMON, *SETTINGS[setting], *changes, *mine, *saving])

    iterations = 0
    while cost(of(iterations + 1)) <= budget:
        iterations += 1
    if not iterations:
        raise ValueError(f"--budget {budget} is less than one iteration of {setting} costs ({cost(of(1))})")
    return of(iterations)


def train(folder: Path, settings: Sequence[str], seeds: Sequence[int], budget: int, changes: Sequence[str]) -> None:
    """Make every run that is not there, and go on with those that were left; then measure them."""
    for seed in seeds:
        for setting in settings:
            config = configured(setting, seed, budget, folder, changes)
            if not (start := folder / "start" / f"{setting}.json").exists():
                write_atomic(start, json.dumps(measure(config, None), indent=1) + "\n")
            run = Run(Path(config.output))
            rows = read_metrics(run.metrics)
            if not rows or rows[-1]["step"] < config.iterations or not run.lora.exists():
                resume = checkpoint.latest(run.checkpoints) is not None
                if not resume and run.folder.exists():
                    lock(run.folder).release()
                    shutil.rmtree(run.folder)  # it was ended before its first checkpoint, and nobody is at it
                trainer.train(config, run.folder if resume else None)
            if not measured_at(run).exists():
                write_atomic(measured_at(run), json.dumps(measure(config, run.lora), indent=1) + "\n")


def tune(folder: Path, settings: Sequence[str], rates: Sequence[str], noises: Sequence[str]) -> None:
    """Seed 0 of every setting at every learning rate, and at the best of them at every level of noise; then, where the
    reward is highest, seeds 1 and 2."""

    def run(at: str, setting: str, seeds: Sequence[int]) -> None:
        for seed in (seed for seed in seeds if str(seed) not in stored(TUNED).get(setting, {}).get(at, {})):
            rate, _, noise = at.partition(NOISE)
            changes = [f"optimizer.lr={rate}", *([f"trainer.noise_level={noise}"] if noise else [])]
            train(folder / at, [setting], [seed], BUDGET, changes)
            known = stored(TUNED)  # read again: others may have added theirs
            measured = json.loads(measured_at(Run(folder / at / f"{setting}-{seed}")).read_text())
            known.setdefault(setting, {}).setdefault(at, {})[str(seed)] = measured
            write_atomic(TUNED, json.dumps(known, indent=1, sort_keys=True) + "\n")

    for setting in settings:
        for rate in rates:
            run(rate, setting, [0])
        rate = chosen(by_rate(stored(TUNED)[setting]))
        for noise in noises:
            run(f"{rate}{NOISE}{noise}", setting, [0])
        run(chosen(stored(TUNED)[setting]), setting, [1, 2])


Tried = dict[str, dict[str, dict[str, float]]]


def by_rate(tried: Tried) -> Tried:
    """The runs at the noise that all begin with."""
    return {at: runs for at, runs in tried.items() if NOISE not in at}


def chosen(tried: Tried) -> str:
    """Where seed 0 has the highest reward."""
    return max(tried, key=lambda at: tried[at]["0"]["reward"])


def tuned() -> str:
    """Markdown: a row per setting, with the reward of seed 0 wherever it was tried, and of three seeds at the best."""
    known = stored(TUNED)
    rates = sorted({at for tried in known.values() for at in by_rate(tried)}, key=float)
    noises = sorted({at.partition(NOISE)[2] for tried in known.values() for at in tried} - {""}, key=float)
    lines = [
        f"| setting | {' | '.join(f'{rate}, seed 0' for rate in rates)} |"
        f"{''.join(f' best rate, noise {noise}, seed 0 |' for noise in noises)}"
        " at the best, seeds 1 and 2 | their mean | mean of three ± sd | diversity of the policy |",
        "| --- " * (5 + len(rates) + len(noises)) + "|",
    ]
    for setting in (name for name in SETTINGS if name in known):
        tried = known[setting]
        best = chosen(tried)
        runs = tried[best].values()
        reward = [run["reward"] for run in runs]
        places = [*rates, *(f"{chosen(by_rate(tried))}{NOISE}{noise}" for noise in noises)]
        cells = [
            NAMES[setting],
            *(f"{tried[at]['0']['reward']:.3f}" if at in tried else "–" for at in places),
            f"{best.replace(NOISE, ', noise ')}: {', '.join(f'{value:.3f}' for value in reward[1:])}",
            f"{mean(reward[1:]):.3f}" if reward[1:] else "–",
            f"{mean(reward):.3f}" + (f" ± {stdev(reward):.3f}" if len(reward) > 1 else ""),
            f"{mean(diversity):.3f}" if (diversity := [r["diversity"] for r in runs if "diversity" in r]) else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_at(run: Run) -> Path:
    return run.folder / "measured.json"


@torch.no_grad()
def measure(config: Config, lora: Path | None) -> dict[str, float]:
    """Reward and diversity on the held-out prompts, of these weights (None: those before training).

    `reward`, `diversity`: PICTURES pictures per prompt by the pipeline's own solver, each from its own noise.
    `group_diversity`: groups as the setting draws them in training, of the first 24 prompts, four with the plan of
    each of the iterations 0, 5, 10, ...: the place of a window is then the same in all settings that draw it.
    """
    pipe = load_pipeline(config.model)
    if lora is not None:
        load_lora(pipe, str(lora))
    policy = Policy(pipe)
    prompts = prompt_files.load(str(config.prompts.eval))
    steps = config.evaluation.num_inference_steps or config.sampling.num_inference_steps
    arguments = call_arguments(config.sampling) | {"num_inference_steps": steps}
    scorer = genrl_rewards.load(config.rewards[0].name, config.rewards[0].args)
    scores: list[float] = []
    distances: list[float] = []
    for first in range(0, len(prompts), 12):
        rows = [row for row in range(first, min(first + 12, len(prompts))) for _ in range(PICTURES)]
        keys = [("measure", row, k % PICTURES) for k, row in enumerate(rows)]
        batch = Batch([prompts[row].text for row in rows], keys, arguments)
        images = policy.decode(batch, policy.generate(batch))
        columns = {name: [prompts[row].columns[name] for row in rows] for name in genrl_rewards.needs(scorer).columns}
        scores += genrl_rewards.score(scorer, images=images, prompts=batch.prompts, columns=columns, group=rows).values
        distances += [distance(group) for group in images.split(PICTURES)]
    in_groups: list[float] = []
    for k in range(6):
        samples = rollout(
            config, policy, [prompt.text for prompt in prompts[4 * k : 4 * k + 4]], min(5 * k, config.iterations - 1)
        )
        images = policy.decode(samples.batch, samples.final)
        in_groups += [distance(group) for group in images.split(config.sampling.group_size)]
    return {"reward": mean(scores), "diversity": mean(distances), "group_diversity": mean(in_groups)}


def rollout(config: Config, policy: Policy, prompts: Sequence[str], iteration: int) -> Samples:
    """One group per prompt, drawn as in this iteration of the configured training; samples in the order of slots."""
    settings = config.trainer
    assert isinstance(settings, PolicyGradient)
    plan = Steps.of(config, settings, iteration).plan
    leaves = plan.leaves // plan.roots
    slots = list(range(0, len(prompts) * plan.leaves, leaves))
    keys = [(config.seed, iteration, slot) for slot in slots]
    batch = Batch([prompts[slot // plan.leaves] for slot in slots], keys, call_arguments(config.sampling))
    kernel = Kernel(settings.kernel, settings.noise_level or 0.0)
    return roll_out(policy, batch, slots, plan, kernel, config.sampling.batch_size)


@torch.no_grad()
def overhead(repeats: int = 5) -> dict[str, dict[str, float]]:
    """Seconds of the rollouts of an iteration and of the bare denoiser calls that they make, medians of `repeats`.

    Both are made in turn in one process, and the ratio is the median of those of neighbours. Seconds are the
    processor's: with one thread those of the wall on a machine that does nothing else, and on a busy one, where the
    wall says little, they stay about what they are.
    """
    results = {}
    for setting in SETTINGS:
        config = load(BASE, [*COMMON, *SETTINGS[setting], "iterations=10"])
        policy = Policy(load_pipeline(config.model))
        prompts = [prompt.text for prompt in prompt_files.load(config.prompts.train)]
        prompts = prompts[: config.sampling.prompts_per_iteration]
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = policy.denoiser.register_forward_pre_hook(lambda _, a, k, c=calls: c.append((a, k)), with_kwargs=True)
        rollout(config, policy, prompts, iteration=0)
        handle.remove()
        whole, bare = [], []
        for _ in range(repeats):
            whole.append(seconds(lambda c=config, p=policy, t=prompts: rollout(c, p, t, iteration=0)))
            bare.append(seconds(lambda p=policy, c=calls: [p.denoiser(*args, **kwargs) for args, kwargs in c]))
        ratio = median(one / other for one, other in zip(whole, bare, strict=True))
        results[setting] = {"rollout_s": median(whole), "bare_s": median(bare), "ratio": ratio}
        print(f"{setting:<14}{median(whole):>8.3f} s{median(bare):>8.3f} s{ratio:>7.3f}", flush=True)
    return results


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def finished(folder: Path) -> dict[str, list[Run]]:
    """Setting -> its runs that are done, by seed."""
    by_setting: dict[str, list[Run]] = defaultdict(list)
    for setting in SETTINGS:
        runs = [Run(path) for path in sorted(folder.glob(f"{setting}-[0-9]*"))]
        by_setting[setting] = [run for run in runs if measured_at(run).exists()]
    return {setting: runs for setting, runs in by_setting.items() if runs}


def curve(run: Run) -> list[tuple[float, float]]:
    """(forward-equivalents in thousands, held-out reward) at every evaluation."""
    spent, points = 0.0, []
    for row in read_metrics(run.metrics):
        spent += row.get("model_calls/sample", 0.0) + TRAINING_CALL * row.get("model_calls/train", 0.0)
        if row.get("eval/total_mean") is not None:
            points.append((spent / 1000, row["eval/total_mean"]))
    return points


def table(folder: Path) -> str:
    """Markdown: a row per setting, means over its seeds, with the sample standard deviation where it matters."""
    lines = [
        "| setting | iterations | model calls: sampling + training | calls per picture in sampling | reward after, "
        "mean ± sd | each seed | diversity of a group, before → after | diversity of the policy, after | minutes "
        "| overhead |",
        "| --- " * 10 + "|",
    ]
    ratios = json.loads(OVERHEAD.read_text()) if OVERHEAD.exists() else {}
    for setting, runs in finished(folder).items():
        rows = [read_metrics(run.metrics)[1:] for run in runs]
        after = [json.loads(measured_at(run).read_text()) for run in runs]
        start = json.loads((folder / "start" / f"{setting}.json").read_text())
        sampling = [sum(row["model_calls/sample"] for row in run) for run in rows]
        training = [sum(row["model_calls/train"] for row in run) for run in rows]
        config = load(runs[0].config)
        pictures = config.sampling.images_per_iteration
        per_picture = mean(calls / len(run) / pictures for calls, run in zip(sampling, rows, strict=True))
        reward = [one["reward"] for one in after]
        spread = f" ± {stdev(reward):.3f}" if len(reward) > 1 else ""
        cells = [
            NAMES[setting],
            "–".join(str(n) for n in sorted({min(map(len, rows)), max(map(len, rows))})),
            f"{mean(sampling) / 1000:.1f}k + {mean(training) / 1000:.1f}k",
            f"{per_picture:.2f}",
            f"{mean(reward):.3f}{spread}",
            ", ".join(f"{value:.3f}" for value in reward),
            f"{start['group_diversity']:.3f} → {mean(one['group_diversity'] for one in after):.3f}",
            f"{mean(one['diversity'] for one in after):.3f}",
            f"{median(sum(row['timing/iteration_s'] for row in run) / 60 for run in rows):.1f}",
            f"{ratios[setting]['ratio']:.2f}" if setting in ratios else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    starts = [json.loads(path.read_text()) for path in sorted((folder / "start").glob("*.json"))]
    lines += ["", f"Before training: reward {starts[0]['reward']:.3f}, diversity {starts[0]['diversity']:.3f}."]
    return "\n".join(lines)


def figure(folder: Path) -> str:
    """Held-out reward against forward-equivalents: the mean over the seeds of each setting, its seeds pale behind."""
    means, seeds, styles = [], [], []
    settings = finished(folder)
    for setting, runs in settings.items():
        curves = [curve(run) for run in runs]
        grid = np.linspace(0, min(points[-1][0] for points in curves), EVALUATIONS + 1)
        interpolated = [np.interp(grid, *zip(*points, strict=True)) for points in curves]
        means.append((NAMES[setting], list(zip(grid.tolist(), np.mean(interpolated, axis=0).tolist(), strict=True))))
        seeds += [(f"{NAMES[setting]}, {run.folder.name}", points) for run, points in zip(runs, curves, strict=True)]
    colours = [COLOURS[list(SETTINGS).index(setting)] for setting in settings]
    for i, colour in enumerate(colours):
        styles.append(f".line-{i}{{stroke:{colour};fill:none;stroke-width:2.2}}.spot.line-{i}{{fill:{colour}}}")
    of_seeds = [colours[i] for i, runs in enumerate(settings.values()) for _ in runs]
    for i, colour in enumerate(of_seeds, len(colours)):
        styles.append(f".line-{i}{{stroke:{colour};fill:none;opacity:.22}}.spot.line-{i}{{display:none}}")
    width, height = 680, 320
    inner = chart([*means, *seeds], width=width, height=height).partition(">")[2].removesuffix("</svg>")
    legend = "".join(
        f'<path class="line-{i}" d="M{60 + 124 * i} {height + 26}h18"/>'
        f'<text x="{83 + 124 * i}" y="{height + 30}">{NAMES[setting]}</text>'
        for i, setting in enumerate(settings)
    )
    title = f'<text x="{width / 2}" y="{height + 8}" text-anchor="middle">thousand forward-equivalents</text>'
    style = f"svg{{background:#fff;font:11px sans-serif}}text{{fill:#475569}}.grid{{stroke:#e2e8f0}}{''.join(styles)}"
    return (
        f'<svg viewBox="0 0 {width} {height + 40}" role="img" aria-label="held-out reward over model calls" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{style}.axis{{stroke:#94a3b8}}</style>{inner}{title}{legend}</svg>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    runs.add_argument("--changes", nargs="+", default=[], metavar="KEY=VALUE", help="of all settings' configuration")
    runs.add_argument("--budget", type=int, default=BUDGET, help="forward-equivalents of a run")
    search = commands.add_parser("tune", help="make the runs at several learning rates")
    search.add_argument("folder", type=Path)
    search.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    search.add_argument("--rates", nargs="+", default=["1e-3", "3e-3", "6e-3"])
    search.add_argument("--noises", nargs="*", default=[])
    commands.add_parser("tuned", help="print their table")
    commands.add_parser("overhead", help="time rollouts against their bare model calls")
    report = commands.add_parser("report", help="print the table, write the figure")
    report.add_argument("folder", type=Path)
    report.add_argument("figure", type=Path)
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, given.settings, given.seeds, given.budget, given.changes)
    elif given.command == "tune":
        tune(given.folder, given.settings, given.rates, given.noises)
    elif given.command == "tuned":
        print(tuned())
    elif given.command == "overhead":
        write_atomic(OVERHEAD, json.dumps(overhead(), indent=1) + "\n")
    else:
        print(table(given.folder))
        write_atomic(given.figure, figure(given.folder))


if __name__ == "__main__":
    main()
