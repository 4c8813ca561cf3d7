"""Vision-language agents with a tool, two seeds each: a table and a figure.

    python -m benchmarks.vlm_tools train runs/tools      # every method and seed that is not done yet
    python -m benchmarks.vlm_tools report                # the table of docs/vlm_tools.md, docs/img/vlm_tools.svg

A run is `genrl train configs/vlm/NAME.yaml` as it stands, in a process of its own with one thread. What the page needs
of a finished run goes to benchmarks/vlm_tools.json, and `report` reads that alone.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.methods import change, panels
from benchmarks.vlm_runs import Results, Summary, average, command, cpu_seconds
from genrl.runtime.folder.run import Run, read_metrics, write_atomic

METHODS = {"para_grpo": "PARA-GRPO", "vrag_rl": "VRAG-RL", "para_grpo_clips": "PARA-GRPO, clips", "conan": "Conan"}
FIGURE = Path("docs/img/vlm_tools.svg")
RESULTS = Path(__file__).with_suffix(".json")
CURVES = {"answers right": "eval/success_mean", "looked at the place": "eval/looked_mean", "reward": "eval/return_mean"}


def summary(run: Run) -> Summary:
    """What the page says of one run; curves are over iterations. They begin before the first one, at 0."""
    rows = read_metrics(run.metrics)
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for row in rows:
        for name, key in CURVES.items():
            if (value := row.get(key)) is not None:
                curves[name].append((row["step"] * bool(curves[name]), round(value, 4)))
    blind = [round(row["eval/success_blind"], 3) for row in rows if "eval/success_blind" in row]
    return {
        "curves": curves,
        "blind": blind,
        "iterations": rows[-1]["step"],
        "cpu_s": cpu_seconds(run),
    }


def table(results: Results) -> str:
    lines = [
        f"| configuration | {' | '.join(CURVES)} | with black pictures | iterations | CPU seconds |",
        "| --- " * 7 + "|",
    ]
    for name, runs in results.items():
        blind = [run["blind"][-1] for run in runs]
        cells = [f"`{name}.yaml`", *(change(runs, curve) for curve in CURVES), f"{mean(blind):.3f}"]
        cells += [str(runs[0]["iterations"]), average(runs, "cpu_s")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(results: Results) -> None:
    print(table(results))
    shown = [(METHODS[name], [run["curves"]["answers right"] for run in runs]) for name, runs in results.items()]
    write_atomic(FIGURE, panels(shown, 260, 170, 2, "held-out answers right over iterations"))


if __name__ == "__main__":
    command(__doc__, RESULTS, METHODS, (0, 1), summary, report)
