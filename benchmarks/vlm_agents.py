"""Vision-language agents in the built-in room, several seeds each: a table and a figure.

    python -m benchmarks.vlm_agents train runs/agents      # every method and seed that is not done yet
    python -m benchmarks.vlm_agents report                 # the table of docs/vlm_agents.md, docs/img/vlm_agents.svg

A run is `genrl train configs/vlm/NAME.yaml` as it stands, in a process of its own with one thread. What the page needs
of a finished run goes to benchmarks/vlm_agents.json, and `report` reads that alone.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.methods import change, panels
from benchmarks.vlm_runs import Results, Summary, average, command, cpu_seconds
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

METHODS = {
    "vl_dac": "VL-DAC",
    "poad": "POAD",
    "token_ppo": "token-level PPO, the control of POAD",
    "archer": "ArCHer",
    "grid_grpo": "GRPO over episodes",
}
SEEDS = (0, 1, 2)
FIGURE = Path("docs/img/vlm_agents.svg")
RESULTS = Path(__file__).with_suffix(".json")


def summary(run: Run) -> Summary:
    """What the page says of one run; curves are over thousands of steps in the environment."""
    rows, steps = read_metrics(run.metrics), 0.0
    curves: dict[str, list[tuple[float, float]]] = {"success": [], "blind": []}
    for row in rows:
        steps = row.get("rollout/env_steps", 0.0) / 1000
        for name, key in (("success", "eval/success_mean"), ("blind", "eval/success_blind")):
            if (value := row.get(key)) is not None:
                curves[name].append((round(steps, 2), round(value, 4)))
    explained = [row["critic/explained_variance"] for row in rows[-5:] if "critic/explained_variance" in row]
    return {
        "curves": curves,
        "iterations": rows[-1]["step"],
        "thousand_steps": round(steps, 1),
        "explained": round(mean(explained), 3) if explained else None,
        "cpu_s": cpu_seconds(run),
    }


def table(results: Results) -> str:
    lines = [
        "| configuration | success, start → end ± sd (each seed) | with black pictures | iterations | thousand steps "
        "| explained variance of the critic | CPU seconds |",
        "| --- " * 7 + "|",
    ]
    for name, runs in results.items():
        cells = [
            f"`{name}.yaml`: {METHODS[name]}",
            change(runs, "success"),
            change(runs, "blind").partition(" ±")[0].replace("*", ""),
            str(runs[0]["iterations"]),
            average(runs, "thousand_steps"),
            average(runs, "explained", 2),
            average(runs, "cpu_s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(results: Results) -> None:
    print(table(results))
    shown = [(METHODS[name], [run["curves"]["success"] for run in runs]) for name, runs in results.items()]
    write_atomic(FIGURE, panels(shown, 260, 170, 3, "success in held-out rooms over thousands of steps"))


if __name__ == "__main__":
    command(__doc__, RESULTS, METHODS, SEEDS, summary, report)
