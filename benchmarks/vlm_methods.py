"""The presets of `configs/vlm` on the embedded vision-language model, several seeds each, in one table.

    python -m benchmarks.vlm_methods train runs/vlm                        # every method and seed that is not done yet
    python -m benchmarks.vlm_methods train runs/vlm --methods quickstart --seeds 0 1 2
    python -m benchmarks.vlm_methods report > docs/vlm_results.md          # and docs/img/vlm_methods.svg

A run is `genrl train configs/vlm/NAME.yaml` as it stands, in a process of its own with one thread; `train` can be
stopped and started again. What the page needs of a finished run goes to benchmarks/vlm_methods.json, and `report` reads
that alone.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.methods import change, panels
from benchmarks.vlm_runs import Results, Summary, average, command, cpu_seconds
from genrl.config import load
from genrl.runtime.folder.run import Run, read_metrics, write_atomic
from genrl.vlm.config.schema import VLMConfig

METHODS = {
    "quickstart": "DAPO's loss",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO, with resampling",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "rloo": "RLOO",
    "dcpo": "DCPO",
    "ngrpo": "NGRPO",
    "vppo": "VPPO",
    "tw_grpo": "TW-GRPO",
    "g2rpo": "G2RPO",
    "grpo_care": "GRPO-CARE",
    "reg_grpo": "Reg-GRPO",
    "gmpo": "GMPO",
    "clip_cov": "Clip-Cov",
    "kl_cov": "KL-Cov",
    "gpg": "GPG",
    "opo": "OPO",
    "remax": "ReMax",
    "rlfr": "RLFR",
    "q_hawkeye": "Q-Hawkeye",
}
FIGURE = Path("docs/img/vlm_methods.svg")
RESULTS = Path(__file__).with_suffix(".json")
HEAD = """
# Presets for vision-language models: what was measured

**On this task none of the presets is ahead of plain GRPO by more than its seeds scatter.** GRPO ends at .969. Only DAPO
with resampling (.990, for 3.5 times as many tokens), RLOO (.994, two seeds) and RLFR (.988, one seed) end higher, all
within the scatter; the other presets end lower, Clip-Cov, DCPO, GMPO, Reg-GRPO, ReMax (some of them one seed) and SAPO
clearly so. The task is easy, and nothing in it is what their papers are about: noise, hard perception, many tasks.
Presets in such situations are [compared here](vlm_claims.md).

This page lists what the presets for vision-language models reach. Every row is an unchanged configuration of
`configs/vlm/`, run to its end on one thread of a shared CPU. If there are several seeds, it gives the mean ± sample
standard deviation, and each seed. All start from the same embedded model, so seeds differ only in questions and sampled
answers. `q_hawkeye.yaml` has its own model and task (scores of picture quality, right within half a point) and cannot
be compared with the others. **Right** is the share of 256 held-out questions that are answered correctly with the most
probable tokens. Their pictures have arrangements that no training picture has; the standard error of one figure is at
most 0.031. **Reward** is the weighted sum that is trained on, for the same answers. Tokens are those of all sampled
answers, including groups that are left out. CPU seconds are those of the process, including loading and evaluations (a
dash: the run was interrupted); those of GPG, OPO, ReMax, GMPO, Clip-Cov and KL-Cov were run on a busy machine. Settings
are the presets' own with one learning rate for all, without tuning.
"""
AFTER = """
![share of right answers over thousands of sampled tokens](img/vlm_methods.svg)

Share of right answers at each evaluation over thousands of sampled tokens, one line per seed.

Made by `python -m benchmarks.vlm_methods` (`train`, then `report`) from `benchmarks/vlm_methods.json`.
"""


def summary(run: Run) -> Summary:
    """What the page says of one run; curves are over thousands of drawn tokens."""
    config = load(run.config)
    assert isinstance(config, VLMConfig)
    answers = config.generation.prompts_per_iteration * config.generation.group_size
    rows, tokens = read_metrics(run.metrics), 0.0
    curves: dict[str, list[tuple[float, float]]] = {"accuracy": [], "total": []}
    for row in rows:
        tokens += answers * row.get("rollout/rounds", 0.0) * row.get("rollout/tokens_mean", 0.0) / 1000
        for name, points in curves.items():
            if (value := row.get(f"eval/{name}_mean")) is not None:
                points.append((round(tokens, 2), round(value, 4)))
    return {
        "curves": curves,
        "iterations": rows[-1]["step"],
        "thousand_tokens": round(tokens, 1),
        "cpu_s": cpu_seconds(run),
    }


def page(results: Results) -> str:
    lines = [
        "| configuration | right, start → end ± sd (each seed) | reward, start → end ± sd | iterations "
        "| thousand tokens | CPU seconds |",
        "| --- " * 6 + "|",
    ]
    for name, runs in results.items():
        cells = [
            f"`{name}.yaml`: {METHODS[name]}",
            change(runs, "accuracy"),
            change(runs, "total").partition(" (")[0],
            str(runs[0]["iterations"]),
            average(runs, "thousand_tokens"),
            average(runs, "cpu_s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n\n".join([HEAD.strip(), "\n".join(lines), AFTER.strip()]) + "\n"


def report(results: Results) -> None:
    print(page(results), end="")
    shown = [(METHODS[name], [run["curves"]["accuracy"] for run in runs]) for name, runs in results.items()]
    write_atomic(FIGURE, panels(shown, 230, 150, 4, "share of right answers over thousands of drawn tokens"))


if __name__ == "__main__":
    command(__doc__, RESULTS, METHODS, (0, 1, 2), summary, report)
