"""Runs of one configuration with several seeds: a table and a curve for the docs, made from the run folders.

    for s in 0 1 2; do genrl train configs/quickstart.yaml seed=$s output=runs/quickstart-$s; done
    python -m benchmarks.seeds docs/img/quickstart.svg eval/shapes_mean,eval/shapes/strict_mean runs/quickstart-*

Prints Markdown: each metric before and after training (mean over the runs, and each run), minutes of training without
evaluation, and peak memory. The figure has one line per run for the first metric.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

from genrl.runtime.folder.run import Run, read_metrics, write_atomic
from genrl.runtime.show.curves import chart

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#475569")


def table(metrics: list[str], folders: list[Path]) -> str:
    """The Markdown table."""
    runs = [read_metrics(Run(folder).metrics) for folder in folders]
    lines = ["| metric | before | after, mean | each run |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        evaluated = [[row[metric] for row in rows if row.get(metric) is not None] for rows in runs]
        before, after = [values[0] for values in evaluated], [values[-1] for values in evaluated]
        each = ", ".join(f"{value:.3f}" for value in after)
        lines.append(f"| `{metric}` | {mean(before):.3f} | {mean(after):.3f} | {each} |")
    minutes = [sum(row.get("timing/iteration_s") or 0.0 for row in rows) / 60 for rows in runs]
    memory = max(row.get("memory/peak_mb") or 0.0 for rows in runs for row in rows)
    iterations = ", ".join(str(rows[-1]["step"]) for rows in runs)
    lines.append("")
    lines.append(
        f"Iterations: {iterations}. Minutes of training, without evaluation: "
        f"{', '.join(f'{m:.1f}' for m in minutes)}. Peak memory: {memory:.0f} MiB."
    )
    return "\n".join(lines)


def figure(metric: str, folders: list[Path]) -> str:
    """The curve as an SVG that stands alone."""
    series = [
        (folder.name, [(row["step"], row[metric]) for row in read_metrics(Run(folder).metrics) if metric in row])
        for folder in folders
    ]
    lines = "".join(f".line-{i}{{stroke:{colour};fill:none}}" for i, colour in enumerate(COLOURS))
    spots = "".join(f".spot.line-{i}{{fill:{colour};stroke:none}}" for i, colour in enumerate(COLOURS))
    style = (
        "<style>svg{background:#fff;font:11px sans-serif}text{fill:#475569}.grid{stroke:#e2e8f0}.axis{stroke:#94a3b8}"
        f".line{{stroke-width:1.6}}{lines}{spots}</style>"
    )
    drawn = chart(series, width=520, height=260)
    head, _, rest = drawn.partition(">")
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}' if "xmlns" not in head else f"{head}>{style}{rest}"
    )


def main() -> None:
    out, metrics, *folders = sys.argv[1:]
    names = metrics.split(",")
    paths = [Path(folder) for folder in folders]
    print(table(names, paths))
    write_atomic(Path(out), figure(names[0], paths))


if __name__ == "__main__":
    main()
