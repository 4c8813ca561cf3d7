"""The ways to fine-tune a policy on one task: Flow-SDE, Flow-Noise, ReinFlow, DPPO, GRPO, three seeds each.

    python -m benchmarks.vla_methods train runs/vla                        # every method and seed that is not done yet
    python -m benchmarks.vla_methods train runs/vla --methods dppo --seeds 0
    python -m benchmarks.vla_methods add dppo 0 runs/dppo                  # a run that `genrl train` made
    python -m benchmarks.vla_methods report > docs/vla_results.md          # and docs/img/vla_methods.svg

A run is `genrl train configs/vla/NAME.yaml` as it stands, in a process of its own with one thread. What the page needs
of a finished run goes to benchmarks/vla_methods.json, and `report` reads that alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.methods import panels, reached, run_genrl
from genrl.config import load
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

METHODS = {
    "flow_sde": "Flow-SDE, PPO",
    "flow_noise": "Flow-Noise, PPO",
    "reinflow": "ReinFlow, PPO",
    "dppo": "DPPO",
    "grpo": "Flow-SDE, GRPO",
    "metaworld": "Meta-World, Flow-SDE, PPO",
    "point_maze": "PointMaze, Flow-SDE, PPO",
    "fetch": "Fetch, Flow-SDE, PPO",
    "reacher": "Reacher, Flow-SDE, PPO",
}
STARTS = {name: f"{name}_sft" for name in ("metaworld", "point_maze", "fetch", "reacher")}
"""What has to be trained first."""
FIGURE = Path("docs/img/vla_methods.svg")
RESULTS = Path(__file__).with_suffix(".json")
HEAD = """
# Policies in simulation: what was measured

This page lists what the methods for policies in simulation reach. Every row is an unchanged configuration of
`configs/vla/`, run to its end on one thread of a shared CPU with three seeds; each starts from the same supervised
policy, so seeds differ only in episodes and noise. **Success** is that of the evaluation: 512 fixed episodes
(Meta-World 96, PointMaze, Fetch and Reacher 256) without exploration; the standard error of one figure is at most 0.022
(0.051, 0.031). MiniTable, PointMaze and Reacher are observed in pictures of 32 pixels, Meta-World and Fetch through
their state.
**To .85** is the number of environment steps until an evaluation first reaches it, linear between evaluations.
Environment steps are those of rollouts. CPU minutes are those of the learner's process, including loading and
evaluations, and of its workers.
"""
AFTER = """
![success over thousands of environment steps](img/vla_methods.svg)

Success of each evaluation over thousands of environment steps, one line per seed.
"""


def train(folder: Path, methods: list[str], seeds: list[int]) -> None:
    """Make every run that is not there."""
    for seed in seeds:
        for name in methods:
            run = Run(folder / f"{name}-{seed}")
            rows = read_metrics(run.metrics)
            if rows and rows[-1]["step"] >= load(run.config).iterations:
                continue
            shutil.rmtree(run.folder, ignore_errors=True)
            changes = [f"seed={seed}", f"output={run.folder}", "trackers=[]"]
            if name in STARTS:  # a policy that does not come along
                start = folder / STARTS[name]
                if not (start / "policy").is_dir():
                    run_genrl(["train", f"configs/vla/{STARTS[name]}.yaml", f"output={start}", "trackers=[]"])
                changes.append(f"policy.path={start}")
            store(name, seed, run, run_genrl(["train", f"configs/vla/{name}.yaml", *changes]))


def store(name: str, seed: int, run: Run, cpu_s: float | None) -> None:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = read_metrics(run.metrics)
    steps, curve = 0.0, []
    for row in rows:
        steps = row.get("rollout/env_steps") or steps
        if row.get("eval/success_mean") is not None:
            curve.append([round(steps), round(row["eval/success_mean"], 4)])
    kept[f"{name}-{seed}"] = {
        "curve": curve,
        "cpu_s": None if cpu_s is None else round(cpu_s, 1),
        "wall_s": round(sum(row.get("timing/iteration_s", 0.0) for row in rows), 1),
        "simulator_s": round(sum(row.get("timing/simulator_s", 0.0) for row in rows), 1),
        "iterations": rows[-1]["step"],
    }
    write_atomic(RESULTS, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def stored() -> dict[str, list[dict[str, Any]]]:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name] for name in METHODS}


def page(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| method | success before → after, mean ± sd (each seed) | environment steps | to .85, each seed "
        "| iterations | CPU minutes |",
        "| --- " * 6 + "|",
    ]
    for name, title in METHODS.items():
        runs = results[name]
        if not runs:
            continue
        before, after = mean(run["curve"][0][1] for run in runs), [run["curve"][-1][1] for run in runs]
        each = ", ".join(f"{value:.3f}" for value in after)
        spread = f" ± {stdev(after):.3f} ({each})" if len(after) > 1 else ""
        steps = mean(run["curve"][-1][0] for run in runs)
        levels = [reached(run["curve"], 0.85) for run in runs]
        told = ", ".join("never" if x is None else f"{x / 1000:.0f}k" for x in levels)
        known = [run["cpu_s"] / 60 for run in runs if run["cpu_s"]]
        minutes = f"{mean(known):.1f}" if known else "-"
        lines.append(
            f"| `{name}.yaml`: {title} | {before:.3f} → **{mean(after):.3f}**{spread} | {steps / 1000:.0f}k | {told} "
            f"| {runs[0]['iterations']} | {minutes} |"
        )
    return "\n\n".join([HEAD.strip(), "\n".join(lines), AFTER.strip(), NOTES.strip()]) + "\n"


NOTES = """
- **Flow-Noise** learns fastest here, and is the most exact in the end: its head can reduce the noise where precision is
  needed. Flow-SDE follows; the same without a critic (GRPO, 64 groups of 8) is not far behind, at the same number of
  steps.
- **ReinFlow** as configured explores less (0.1 to 0.24 against 0.2 to 0.6) and is slower. It begins higher because its
  means are clamped, in evaluation too.
- **DPPO** starts from another policy: from the same demonstrations a diffusion policy takes longer to learn to use the
  pictures (.449). It rises steadily and was still rising at the end. Ten trained steps make every decision ten samples,
  which costs five times the time.
- **Meta-World** (reach, push, pick-place, observed through their state) reaches .85 after about 130,000 steps and stays
  between .87 and .94. The last evaluations are not its best ones, but 96 episodes cannot separate them. These three
  runs were each evaluated on their own list of episodes, so they begin at .61, .59 and .50 (this defect has been fixed:
  the list now depends only on the evaluation seed).
- **Meta-World from pixels**, not in the table (64 pixels, two tasks, 10 demonstrations each, 600 supervised steps, a
  frozen encoder): .389 before and .458 (.348 to .573, 72 episodes) after 149,000 environment steps, which is not a
  significant gain with so few episodes. Run `genrl train configs/vla/metaworld_sft.yaml policy.new.image_size=64
  environment.max_steps=100 'environment.tasks=[button-press-topdown-v3, drawer-open-v3]' trainer.batch_size=64
  trainer.steps_per_iteration=150
  iterations=4`, then `metaworld.yaml` with the same tasks and limit and `policy.freeze=encoder environment.num_envs=96
  iterations=16`.
- **PointMaze** from pictures: the 95 % intervals (Wilson) are .616 to .730 before, and .756 to .852, .760 to .856 and
  .727 to .828 after. It was still rising when it was stopped, after 2.3 CPU minutes.
  Its encoder is that of only 60 supervised steps and stays frozen. More of them leave little to mend: after 100 (of a
  schedule of 500) a policy succeeded in .96 of 128 episodes of up to 300 actions instead of 160.
- **Fetch** (`reach`) from its state: the intervals are .482 to .603 before, and .820 to .903, .794 to .883 and .833 to
  .913 after. The first two iterations train the critic alone. From pictures of 64 pixels there is no recipe: with 600
  demonstrations and batches of 64, a policy succeeded in .051 of 256 episodes after 150 supervised steps and in .043
  after 300 (of 450, after which it was not watched), .102 before any; from the state 28 steps suffice for .543. So the
  encoder does not find the point in the air, which is 4 pixels wide, in that time, and reinforcement, which begins with
  a frozen encoder, has nothing to begin from. Besides, one camera hardly tells how far away a point in the air is.
- **Reacher** from pictures: the intervals are .521 to .641 before, and .803 to .890, .838 to .917 and .829 to .910 after.
  It is the simulator's pictures that are used: with those of another episode the policy of seed 0 succeeds in .215 (.169
  to .269), the one before in .125; random torques that are held for 8 actions in .315 of 200
  episodes. Episodes also become shorter, from 24.1 actions to 15.9, 14.7 and 15.7. The encoder is that of 400 supervised steps (1.5 CPU minutes, not counted above) and
  stays frozen. Earlier tries did not get there: with a success of 2 cm (a ball of 3 pixels), and an expert that pushes
  by .6 per radian near the target instead of 2, a policy succeeded in .25 of 128 episodes of 40 actions after 300 steps
  (of 128 frames) and in .26 after 600 (of 64 frames, from four times the demonstrations and with more light), which is
  hardly more than what random torques do (.14 in 32 actions, .21 in 50).
- None of these settings was tuned beyond a few runs. The constants of pi_RL, DPPO and ReinFlow are for policies a
  thousand times larger; a configuration that departs from them says so.

## A value for the chunk, or for every action

This compares both kinds of `trainer.values` ([what they are](vla.md#values-of-actions)) on `flow_sde.yaml`, seeds 0
and 1. A value for every action needs a ratio for every action too, so the second row changes that alone. Gamma and
lambda of the third are .9975 and .987 per action, .99 and .95 per chunk of four.

| settings | success after 513k steps | after 179k | to .85 | CPU minutes |
| --- | --- | --- | --- | --- |
| unchanged: `level: chunk`, `values: chunk` | 0.902, 0.957 | 0.805, 0.793 | 226k, 234k | 1.1, 1.2 |
| `level: action`, `values: chunk` | 0.947, 0.951 | 0.838, 0.781 | 200k, 227k | 1.1, 1.2 |
| `level: action`, `values: action`, `discount: smdp`, `gamma: 0.9975`, `lam: 0.987` | 0.955, 0.953 | 0.836, 0.803 | 209k, 239k | 1.2, 1.3 |

With chunks of four actions and one reward at the end, values of actions do no harm and cost nothing. Their gain over
the first row is no larger than the difference between its two seeds, and the ratio of an action, without such values,
is as good.

## Corrections against more demonstrations

`dagger.yaml` ([what it does](vla.md#corrections-by-an-expert-dagger)) against plain supervised training with as many
labels and updates. Both begin with `assets/tiny-vla` (success 0.574, 0.531 to 0.616), train all of it for 600 steps of
128 frames at the same rate, and have the same 200 demonstrations; the seed decides these, episodes and minibatches. To
them DAgger adds the expert's chunks at the policy's decisions, supervised training the frames of further
demonstrations. A label is an observation with the expert's four actions from there. Success is that of 512 episodes,
with 95 % intervals. The second arm is `genrl train configs/vla/sft.yaml policy.new=null policy.path=assets/tiny-vla
policy.freeze=nothing trainer.steps_per_iteration=100 optimizer.lr=3e-4 iterations=6` with `demonstrations.expert=322`,
333 and 327 for the seeds 0, 1 and 2.

| seed | labels added: DAgger, demonstrations | DAgger | as many labels | as many actions of the expert |
| --- | --- | --- | --- | --- |
| 0 | 1,475, 1,370 | **0.998** (0.989 to 1.000) | 0.906 (0.878 to 0.929) | 0.922 (0.895 to 0.942) |
| 1 | 1,605, 1,543 | **1.000** (0.993 to 1.000) | 0.938 (0.913 to 0.955) | 0.928 (0.902 to 0.947) |
| 2 | 1,540, 1,489 | **1.000** (0.993 to 1.000) | 0.895 (0.865 to 0.918) | 0.908 (0.880 to 0.930) |

A frame of a demonstration costs the expert one new action, since neighbouring frames share theirs, a correction four:
the last column has four times as many further demonstrations (`demonstrations.expert=687`, 730 and 709). After 200 steps
DAgger has 0.941, 0.949 and 0.865, as many labels of demonstrations have 0.844, 0.844 and 0.797; after 400 steps 0.986,
0.996 and 0.992 against 0.885, 0.914 and 0.887. So corrections are the better use of an expert here: they leave one
failure in fifteen hundred episodes, where more demonstrations leave one in eleven or twelve. They need an expert who can
be asked anywhere, and the robot's time: 5,300 to 5,900 actions.
"""  # noqa: E501 - a row of a table


def figure(results: dict[str, list[dict[str, Any]]]) -> str:
    """One panel per method: success against thousands of environment steps, a line per seed."""
    shown = [
        (title, [[(steps / 1000, success) for steps, success in run["curve"]] for run in results[name]])
        for name, title in METHODS.items()
        if results[name]
    ]
    return panels(shown, 300, 190, 3, "success over thousands of environment steps, per method")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="make the runs")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one = commands.add_parser("add", help="take a finished run of `genrl train`; what it cost is then not known")
    one.add_argument("method", choices=METHODS)
    one.add_argument("seed", type=int)
    one.add_argument("folder", type=Path)
    commands.add_parser("report", help="print the page, write the figure")
    given = parser.parse_args()
    if given.command == "train":
        train(given.folder, given.methods, given.seeds)
    elif given.command == "add":
        store(given.method, given.seed, Run(given.folder), None)
    else:
        results = stored()
        print(page(results), end="")
        write_atomic(FIGURE, figure(results))


if __name__ == "__main__":
    main()
