"""Every method from its own YAML on the embedded models, three seeds each: the runs, and docs/results.md made of them.

    python -m benchmarks.methods train runs/methods                        # every method and seed that is not done yet
    python -m benchmarks.methods train runs/methods --methods awm dgpo --seeds 0
    python -m benchmarks.methods add awm 0 runs/awm                        # a run that `genrl train` made
    python -m benchmarks.methods report > docs/results.md                  # and docs/img/methods.svg

A run is `genrl train configs/...yaml` as it stands, in a process of its own with one thread; where the YAML has no
reward of weight 0, a second scorer is put there that is logged and never trained on: how well picture and caption agree
for assets/tiny-clip. `train` can be stopped and started again: finished runs are skipped, begun ones resumed. The
processor's seconds of a run, loading and evaluation included, are in cost.json of its folder. What the page needs of a
finished run goes to benchmarks/methods.json, and `report` reads that alone. That is also the diversity of the pictures
before and after, which `train` and `add` measure with the weights of the run (`benchmarks.diversity`), once: it is then
in diversity.json of its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from benchmarks.diversity import measure
from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run, lock, read_metrics, write_atomic
from genrl.runtime.show.curves import chart

SECOND = {"name": "clipscore", "weight": 0, "args": {"model": "assets/tiny-clip"}}
FIGURE = Path("docs/img/methods.svg")
RESULTS = Path(__file__).with_suffix(".json")
TRAINING_CALL = 3
"""Forward-equivalents of a model call in training: one forward and a backward of two."""

SEEDS = tuple(f"seed {seed}" for seed in range(10))

Summary = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A configuration and what the table says of it."""

    title: str
    config: str
    page: str
    changes: tuple[str, ...] = ()
    evaluation: str = "eval"
    """Where its held-out figures stand in the log."""


def _method(title: str, name: str, page: str) -> Method:
    return Method(title, f"configs/diffusion/{name}.yaml", page)


METHODS = {
    "flow_grpo": Method("Flow-GRPO", "configs/flow_grpo.yaml", "flow_grpo.md"),
    "dance_grpo": _method("Dance-GRPO", "dance_grpo", "flow_grpo.md"),
    "grpo_guard": _method("GRPO-Guard", "grpo_guard", "grpo_guard.md"),
    "ddpo": _method("DDPO", "ddpo", "ddpo.md"),
    "prdp": _method("PRDP", "prdp", "prdp.md"),
    "adv_grpo": _method("Adv-GRPO", "adv_grpo", "adv_grpo.md"),
    "paco_grpo": _method("PaCo-GRPO", "paco_grpo", "paco_grpo.md"),
    "diffusion_nft": _method("DiffusionNFT", "diffusion_nft", "diffusion_nft.md"),
    "awm": _method("AWM", "awm", "awm.md"),
    "dgpo": _method("DGPO", "dgpo", "dgpo.md"),
    "crd": _method("CRD", "crd", "crd.md"),
    "dpo": _method("Diffusion-DPO, online", "dpo", "dpo.md"),
    "dpo_offline": _method("Diffusion-DPO, offline", "dpo_offline", "dpo.md"),
    "d3po": _method("D3PO", "d3po", "d3po.md"),
    "spo": _method("SPO", "spo", "spo.md"),
    "b2_diffurl": _method("B2-DiffuRL", "b2_diffurl", "trees.md"),
    "draft": _method("DRaFT", "draft", "draft.md"),
    "diff_instruct": _method("Diff-Instruct*", "diff_instruct", "diff_instruct.md"),
    "talk2move": _method("Talk2Move", "talk2move", "talk2move.md"),
    "prompt_rl": Method(
        "PromptRL, rewritten", "configs/diffusion/prompt_rl.yaml", "prompt_rl.md", evaluation="eval_rewritten"
    ),
}


@dataclass(frozen=True)
class Claim:
    """What a method is known for, in miniature."""

    title: str
    setting: str
    finding: str
    methods: dict[str, Method]
    level: float | None = None
    """Held-out reward whose price is compared."""


_CLIP = (
    "rewards=[{name: clipscore, args: {model: assets/tiny-clip}}, {name: shapes, weight: 0}]",
    *("sampling.num_inference_steps=3", "sampling.batch_size=64", "optimizer.lr=5e-4"),
    *("iterations=40", "evaluation.every=10"),
)
CLAIMS = (
    Claim(
        title="Does DiffusionNFT reach the same reward in fewer model calls?",
        setting="The two configurations of the table, compared at the same held-out reward.",
        finding="Yes: 2.3 times fewer in the mean of three seeds (56, 63 and 79 thousand against 139, 155 and 152). "
        "After 80 iterations it is also higher on the scorer on which neither is trained. It learns from "
        "finished samples at two noise levels. So an iteration is cheaper, and every picture counts at any "
        "level instead of at three steps.",
        methods={name: METHODS[name] for name in ("flow_grpo", "diffusion_nft")},
        level=0.58,
    ),
    Claim(
        title="Does PRDP keep rising on many prompts where DDPO falls?",
        setting="Both train on the agreement of picture and caption (`clipscore`), over all 272 prompts, 192 pictures "
        "per iteration from 3 steps: PRDP 24 prompts x 8 with a beta of 0.3 (its file: 1), DDPO 192 prompts x 1 "
        "against their history.",
        finding="PRDP ends higher on both seeds and rises at every evaluation of seed 0, where DDPO goes up and down "
        "(.553, .546, .550, .566 at 10, 20, 30, 40). But DDPO does not fall, and the difference of .011 is "
        "less than the standard error of .016 for 96 prompts. On compressibility, above, PRDP ends lower in kB "
        "on each of three seeds with the same number of pictures. The collapse that the paper reports over "
        "100,000 prompts is not reproduced. The `shapes` score moves for neither. On 10,000 generated prompts, with "
        "three seeds, PRDP rose throughout and ended .047 higher than DDPO "
        "([PRDP](prdp.md#measured-on-the-embedded-model)).",
        methods={
            "prdp_clip": Method(
                "PRDP",
                METHODS["prdp"].config,
                "prdp.md",
                (*_CLIP, "sampling.prompts_per_iteration=24", "trainer.beta=0.3"),
            ),
            "ddpo_clip": Method(
                "DDPO", METHODS["ddpo"].config, "ddpo.md", (*_CLIP, "sampling.prompts_per_iteration=192")
            ),
        },
    ),
    Claim(
        title="Does Adv-GRPO keep the held-out scorer up where a proxy alone makes it fall?",
        setting="Adv-GRPO trains `assets/tiny-clip`, as PickScore, together with the model, from reference pictures. "
        "It is compared with Flow-GRPO with the same settings on the same scorer, frozen. Neither trains on "
        "`shapes`, the rule.",
        finding="Not shown. The held-out rule goes from .491 to .511 with Adv-GRPO and to .518 with the frozen scorer "
        "(means of three seeds, spread .03 and .02). In 80 iterations the frozen scorer is not hacked, so "
        "there is nothing to prevent, and neither moves the rule beyond its standard error of .035. Where a "
        "reward is hacked here, as `jpeg` is above, `shapes` falls to between an eighth and .36 of what it was.",
        methods={
            "adv_grpo": METHODS["adv_grpo"],
            "proxy_grpo": Method(
                "Flow-GRPO on the frozen scorer",
                "configs/flow_grpo.yaml",
                "flow_grpo.md",
                (
                    "rewards=[{name: pickscore, args: {model: assets/tiny-clip, processor: assets/tiny-clip}}, "
                    "{name: shapes, weight: 0}]",
                    "iterations=80",
                ),
            ),
        },
    ),
    Claim(
        title="Do PaCo-GRPO's small pictures cost less at an equal end reward?",
        setting="The configuration, and the same with rollouts and training at 64 px; both are judged at 64 px.",
        finding="No, not on this task. A picture at 56 px costs 0.7 to 0.8 of one at 64 px (measured separately, "
        "[PaCo-GRPO](paco_grpo.md)), and a whole run with its evaluations at 64 px costs 0.9. But training at "
        "56 px ends at .763 and at 64 px at .834 (three seeds; each of the latter is above each of the "
        "former). A latent of 8 x 8 places has no room to spare: 7 x 7 may be a different task here, which "
        "need not hold for 768 px compared with 1,024. That was not tested.",
        methods={
            "paco_grpo": METHODS["paco_grpo"],
            "paco_full": Method(
                "PaCo-GRPO at 64 px",
                METHODS["paco_grpo"].config,
                "paco_grpo.md",
                ("sampling.height=64", "sampling.width=64"),
            ),
        },
    ),
)
HEAD = """
# Every method on the embedded models

This page lists what every method reaches on the embedded models, the tiny ones of this repository. Each row is an
unchanged configuration, run to its end on one thread of a shared CPU with three seeds: mean ± sample standard
deviation, and each seed. (Rows of the questions below have the changes named there, some of them two seeds.) The rows
are not a ranking, since models, budgets and rewards differ: a method is compared with itself before training.

- **Held-out** are the prompts of the evaluation, on which no run trains: 96 of shapes (Talk2Move 64 instructions,
  PaCo-GRPO 24 prompts x 4), one picture each from fixed noise, so a single figure has a standard error of about 0.03.
- The **second scorer** has weight 0.
- **Diversity** is the root mean square difference of the pixels, from 0 to 1, of two pictures of one prompt: the mean
  over all pairs of 4 pictures, drawn as in the evaluation, of each of the first 24 held-out prompts (PromptRL: as
  rewritten for each picture). Plainer pictures, which `jpeg` rewards, differ less as well. A single value is that of
  seed 0, except for Flow-GRPO, which has two.
- **Model calls** count every sample of a denoiser's batch, without evaluation. **CPU minutes** include evaluation and
  loading; a dash means that the run was interrupted or made by hand.

**Runs made again.** But for B2-DiffuRL's, diversity was measured in runs that were made again with the seeds of the
row, on another machine. Thirteen rows came out the same within 0.003. These did not: Flow-GRPO (seed 0: 0.591 for
0.622), GRPO-Guard (0.600 for 0.587), DiffusionNFT (0.634 for 0.685), CRD (0.663 for 0.637), DRaFT (0.713 for 0.692),
and Diff-Instruct*, whose row is that of the second making, all three seeds (before: 0.744 ± 0.009; its CPU minutes are
of the first). The code is not the cause: the commits that made the rows of DRaFT and Diff-Instruct* and the present one
give the same first 20 and 25 iterations on one machine, to the last digit, and these differ from the rows. Rounding is
enough: two threads instead of one move DRaFT's `shapes` after 20 iterations from 0.510 to 0.524. So a seed repeats a
run on one machine with one number of threads; on another, take it for one more seed.
"""
AFTER_TABLE = """
![held-out reward of each method over thousand forward-equivalents](img/methods.svg)

Held-out reward over thousands of forward-equivalents (a call in training counts as three), one line per seed.

`shapes` scores by rule what a picture shows (partial credit, 0 to 1). `clipscore` is the cosine of `assets/tiny-clip`,
which was trained on pictures and captions of the same world. On pictures of the untrained model the two agree only in
part (correlation .40 within a prompt), so one may rise without the other. `jpeg` is the size in kB, as a penalty.

Made by `python -m benchmarks.methods` (`train`, then `report`) from `benchmarks/methods.json`.
"""


def train(folder: Path, methods: dict[str, Method], seeds: list[int]) -> None:
    """Make every run that is not there, and go on with those that were left."""
    for seed in seeds:
        for name, method in methods.items():
            run = Run(folder / f"{name}-{seed}")
            changes = [*method.changes, *second_scorer(method), f"seed={seed}", f"output={run.folder}"]
            complete(run, ["train", method.config, *changes, "checkpoint.keep=1", "trackers=[]"])
            store(name, seed, run, method)


def complete(run: Run, command: list[str]) -> None:
    """Make the run that `genrl ...` begins, or go on with what was left of it; a finished one stays as it is."""
    if finished(run):
        return
    resume = checkpoint.latest(run.checkpoints) is not None
    if not resume and whole(run):
        raise SystemExit(f"{run.folder} has all its rows and no checkpoint any more: store it by `add`, or remove it")
    if not resume and run.folder.exists():
        lock(run.folder).release()  # refuses where another process is still at it
        shutil.rmtree(run.folder)
    cpu_s = run_genrl(["resume", str(run.folder)] if resume else command)
    if not resume:  # else what it had cost before is not known
        write_atomic(cost_of(run), json.dumps({"cpu_s": cpu_s}) + "\n")


def run_genrl(arguments: list[str]) -> float:
    """`genrl ...` in a process of its own with one thread; the processor's seconds of it and of its own processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen([sys.executable, "-m", "genrl", *arguments], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"genrl {' '.join(arguments)} ended with {code}")
    return usage.ru_utime + usage.ru_stime


def second_scorer(method: Method) -> list[str]:
    """The change that adds it, where the configuration has no reward of weight 0."""
    rewards = [reward.model_dump(mode="json", exclude_defaults=True) for reward in config_of(method).rewards]
    if any(reward.get("weight") == 0 for reward in rewards):
        return []
    flow = yaml.safe_dump([*rewards, SECOND], default_flow_style=True, width=10_000).strip()
    return [f"rewards={flow}"]


def config_of(method: Method) -> Config:
    return load(method.config, list(method.changes))


def cost_of(run: Run) -> Path:
    return run.folder / "cost.json"


def diversity_of(run: Run) -> Path:
    return run.folder / "diversity.json"


def finished(run: Run) -> bool:
    """Whether its last row and its last checkpoint are there: a run may have ended between the two."""
    last = checkpoint.latest(run.checkpoints)
    return whole(run) and last is not None and last.name == f"step-{load(run.config).iterations:06d}"


def whole(run: Run) -> bool:
    """Whether the row of every iteration is there."""
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    return bool(rows) and rows[-1]["step"] >= load(run.config).iterations


def summary(run: Run, method: Method) -> Summary:
    """What the page says of one run."""
    config = load(run.config)
    named = list(zip(config.reward_labels, (reward.weight for reward in config.rewards), strict=True))
    rows = read_metrics(run.metrics)
    metrics = ["total", *config.reward_labels]
    return {
        "trained": [name for name, weight in named if weight],
        "logged": [name for name, weight in named if not weight],
        "iterations": rows[-1]["step"],
        "sampling_calls": sum(row.get("model_calls/sample", 0.0) for row in rows),
        "training_calls": sum(row.get("model_calls/train", 0.0) for row in rows),
        "cpu_s": round(json.loads(cost_of(run).read_text())["cpu_s"], 1) if cost_of(run).exists() else None,
        "curves": {name: evaluations(rows, f"{method.evaluation}/{name}_mean") for name in metrics},
        "diversity": json.loads(diversity_of(run).read_text()) if diversity_of(run).exists() else None,
    }


def evaluations(rows: list[dict[str, Any]], metric: str) -> list[tuple[float, float]]:
    """(forward-equivalents in thousands, held-out value) at every evaluation."""
    spent, points = 0.0, []
    for row in rows:
        spent += row.get("model_calls/sample", 0.0) + TRAINING_CALL * row.get("model_calls/train", 0.0)
        if row.get(metric) is not None:
            points.append((round(spent / 1000, 3), round(row[metric], 5)))
    return points


def change(runs: list[Summary], metric: str) -> str:
    """`start → end ± sd (each)` of a held-out metric, or a dash."""
    curves = [run["curves"].get(metric, []) for run in runs]
    if not all(len(points) > 1 for points in curves):
        return "–"
    return start_to_end([(points[0][1], points[-1][1]) for points in curves])


def start_to_end(each_run: Sequence[Sequence[float]]) -> str:
    """`start → end ± sd (each)` of (start, end) of every run, or a dash where there are none."""
    if not each_run:
        return "–"
    start, after = mean(pair[0] for pair in each_run), [pair[1] for pair in each_run]
    if len(after) == 1:
        return f"{start:.3f} → {after[0]:.3f}"
    each = ", ".join(f"{value:.3f}" for value in after)
    return f"{start:.3f} → **{mean(after):.3f}** ± {stdev(after):.3f} ({each})"


def table(methods: dict[str, Method], results: dict[str, list[Summary]]) -> str:
    """A row per method: means over its seeds, sample standard deviations."""
    lines = [
        "| method | trained on | held-out reward, start → end ± sd (each seed) | second scorer, not trained on "
        "| diversity of a prompt's pictures, start → end ± sd (each seed) | iterations "
        "| model calls: sampling + training | CPU minutes |",
        "| --- " * 8 + "|",
    ]
    for name, method in methods.items():
        runs = results.get(name, [])
        if not runs:
            continue
        cells = [
            f"[{method.title}]({method.page})",
            " + ".join(runs[0]["trained"]),
            change(runs, "total"),
            "<br>".join(f"{label} {change(runs, label)}" for label in runs[0]["logged"]),
            start_to_end([run["diversity"] for run in runs if run.get("diversity")]),
            str(runs[0]["iterations"]),
            f"{mean(run['sampling_calls'] for run in runs) / 1000:.1f}k + "
            f"{mean(run['training_calls'] for run in runs) / 1000:.1f}k",
            f"{mean(minutes):.1f}" if (minutes := [run["cpu_s"] / 60 for run in runs if run["cpu_s"]]) else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def prices(claim: Claim, results: dict[str, list[Summary]]) -> str:
    """What each run pays until its held-out reward first reaches the level, linear between evaluations."""
    assert claim.level is not None
    lines = [
        f"| method | thousands of forward-equivalents until the held-out reward is {claim.level:g}, each seed |",
        "| --- | --- |",
    ]
    for name, method in claim.methods.items():
        each = [reached(run["curves"]["total"], claim.level) for run in results.get(name, [])]
        if each:
            lines.append(f"| {method.title} | {', '.join('never' if x is None else f'{x:.0f}' for x in each)} |")
    return "\n".join(lines)


def reached(points: list[tuple[float, float]], level: float) -> float | None:
    """Where a curve first reaches `level`, or None."""
    for (x, y), (x_next, y_next) in pairwise(points):
        if y < level <= y_next:
            return x + (x_next - x) * (level - y) / (y_next - y)
    return None


def figure(methods: dict[str, Method], results: dict[str, list[Summary]]) -> str:
    """One small panel per method: held-out reward against forward-equivalents, a line per seed."""
    shown = [
        (method.title, [[tuple(point) for point in run["curves"]["total"]] for run in results[name]])
        for name, method in methods.items()
        if name in results
    ]
    return panels(shown, 230, 150, 4, "held-out reward over thousand forward-equivalents, per method")


def panels(
    shown: list[tuple[str, list[Any]]], width: int, height: int, columns: int, label: str, lines: Sequence[str] = SEEDS
) -> str:
    """A picture of small charts side by side: for each its title, and the points (x, y) of every line. lines: their
    names."""
    found = []
    for k, (title, curves) in enumerate(shown):
        series = [*zip(lines, curves, strict=False)]
        inner = chart(series, width=width, height=height - 22).partition(">")[2].removesuffix("</svg>")
        x, y = k % columns * width, k // columns * height
        head = f'<text class="title" x="{width / 2}" y="12" text-anchor="middle">{title}</text>'
        found.append(f'<g transform="translate({x} {y})">{head}<g transform="translate(0 14)">{inner}</g></g>')
    rows = -(-len(shown) // columns)
    colours = ("#2563eb", "#d97706", "#059669")
    styles = "".join(f".line-{i}{{stroke:{c};fill:none}}.spot.line-{i}{{fill:{c}}}" for i, c in enumerate(colours))
    style = f"svg{{background:#fff;font:10px sans-serif}}text{{fill:#475569}}.title{{font-weight:600}}{styles}"
    return (
        f'<svg viewBox="0 0 {columns * width} {rows * height}" role="img" xmlns="http://www.w3.org/2000/svg" '
        f'aria-label="{label}"><style>'
        f"{style}.grid{{stroke:#e2e8f0}}.axis{{stroke:#94a3b8}}.line{{stroke-width:1.6}}</style>{''.join(found)}</svg>"
    )


def page(results: dict[str, list[Summary]]) -> str:
    """docs/results.md."""
    parts = [HEAD.strip(), table(METHODS, results), AFTER_TABLE.strip()]
    for claim in CLAIMS:
        if any(name in results for name in claim.methods):
            parts += [f"## {claim.title}", claim.setting, table(claim.methods, results)]
            parts += [prices(claim, results)] if claim.level is not None else []
            parts += [claim.finding]
    return "\n\n".join(parts) + "\n"


def stored() -> dict[str, list[Summary]]:
    """Name -> summaries by seed, of all runs that were ever finished."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = {key.rpartition("-")[0] for key in kept}
    return {name: [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name] for name in names}


def store(name: str, seed: int, run: Run, method: Method) -> None:
    """Keep the summary of a finished run, and how diverse its pictures are."""
    if not diversity_of(run).exists():
        write_atomic(diversity_of(run), json.dumps(measure(run, method.evaluation)) + "\n")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[f"{name}-{seed}"] = summary(run, method)
    write_atomic(RESULTS, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def main() -> None:
    every = METHODS | {name: method for claim in CLAIMS for name, method in claim.methods.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--methods", nargs="+", choices=every, default=list(every))
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one = commands.add_parser("add", help="take a finished run of `genrl train`; what it cost is then not known")
    one.add_argument("method", choices=every)
    one.add_argument("seed", type=int)
    one.add_argument("folder", type=Path)
    commands.add_parser("report", help="print the page, write the figure")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, {name: every[name] for name in given.methods}, given.seeds)
    elif given.command == "add":
        store(given.method, given.seed, Run(given.folder), every[given.method])
    else:
        results = stored()
        print(page(results), end="")
        write_atomic(FIGURE, figure(METHODS, results))


if __name__ == "__main__":
    main()
