"""Pictures by tokens: DPO against GRPO, in and out of the domain, by reward and by scale, three seeds each.

    python -m benchmarks.image_tokens train runs/tokens                     # every run that is not done yet
    python -m benchmarks.image_tokens train runs/tokens --settings groups_4 --seeds 0
    python -m benchmarks.image_tokens report                                # the tables of docs/sequence_policies.md

The questions are those of a study of Janus-Pro (arXiv 2505.17017). A run is `genrl train` of ar_image_grpo.yaml or
ar_image_dpo.yaml in configs/vlm with the changes below, in a process of its own with one thread; all sample 6,400
pictures. What the table needs goes to benchmarks/results/image_tokens.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.vlm_runs import Summary, average, cpu_seconds, situations
from genrl.runtime.folder.run import Run, read_metrics

RESULTS = Path(__file__).parent / "results" / "image_tokens.json"
SEEDS = (0, 1, 2)
METHODS = {"grpo": "ar_image_grpo", "dpo": "ar_image_dpo"}
LAST = 10
"""Iterations at the end whose own pictures give the figure in the domain, 640 of them."""
CLIP = "{name: clipscore, args: {model: assets/tiny-clip}, weight: %d}"
RULE = f"rewards=[{{name: shapes}}, {CLIP % 0}]"
SETTINGS: dict[str, tuple[str, ...]] = {
    "rule": (RULE,),
    "learned": (f"rewards=[{{name: shapes, weight: 0}}, {CLIP % 1}]",),
    "groups_4": (RULE, "generation.group_size=4", "generation.prompts_per_iteration=16"),
    "captions_16": (RULE, "task.rows=16"),
}
"""Changes by setting. captions_16: only so many captions to train on, instead of new ones in every iteration."""
TITLES = {
    "rule": "trained on the rule, groups of 8, ever new captions",
    "learned": "trained on the learned scorer",
    "groups_4": "groups of 4",
    "captions_16": "16 captions",
}


def plan(setting: str, folder: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Both methods, with their configurations and changes."""
    yield from ((method, config, SETTINGS[setting]) for method, config in METHODS.items())


def summary(run: Run, setting: str) -> Summary:
    """Of both scorers: out of the domain at each evaluation, and in it over the first and the last iterations."""
    rows = read_metrics(run.metrics)
    found: Summary = {"cpu_s": cpu_seconds(run)}
    for name in ("shapes", "clipscore"):
        evaluated = [(row["step"], round(row[f"eval/{name}_mean"], 4)) for row in rows if f"eval/{name}_mean" in row]
        own = [row[f"reward/{name}_mean"] for row in rows if f"reward/{name}_mean" in row]
        found[name] = {"out": evaluated, "in": [round(mean(own[:1]), 4), round(mean(own[-LAST:]), 4)]}
    return found


def cell(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def table(results: dict[str, Summary]) -> str:
    """A row for each setting and method that has runs."""
    lines = [
        "| setting | method | rule, in domain | rule, held out | learned, in domain | learned, held out | CPU s |",
        "| --- " * 7 + "|",
    ]
    for setting, title in TITLES.items():
        for method in METHODS:
            found = [results[key] for seed in SEEDS if (key := f"{setting}-{method}-{seed}") in results]
            if not found:
                continue
            cells = [title, method.upper()]
            for name in ("shapes", "clipscore"):
                cells += [cell([one[name]["in"][1] for one in found]), cell([one[name]["out"][-1][1] for one in found])]
            cells.append(average(found, "cpu_s"))
            lines.append(f"| {' | '.join(cells)} |")
    first = [one for key, one in results.items() if key.startswith("rule")] or [*results.values()]
    if not first:
        return "\n".join(lines)
    before = [
        mean(one[name][place][0] if place == "in" else one[name][place][0][1] for one in first)
        for name in ("shapes", "clipscore")
        for place in ("in", "out")
    ]
    lines.append(f"| before training | | {' | '.join(f'{value:.3f}' for value in before)} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    situations(__doc__, RESULTS, "settings", SETTINGS, SEEDS, plan, summary, table)
