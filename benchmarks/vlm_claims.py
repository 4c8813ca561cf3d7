"""Presets where their claims live: situations made for them, against plain GRPO at equal tokens, five seeds each.

    python -m benchmarks.vlm_claims train runs/claims                      # every run that is not done yet
    python -m benchmarks.vlm_claims train runs/claims --claims small --seeds 0 1
    python -m benchmarks.vlm_claims report > docs/vlm_claims.md

A run is `genrl train` of a configuration of configs/vlm with the changes below, in a process of its own with one
thread; `train` can be stopped and started again. What the page needs of a finished run goes to
benchmarks/vlm_claims.json, and `report` reads that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks.vlm_runs import Summary, situations
from genrl.config import load
from genrl.runtime.folder.run import Run, read_metrics
from genrl.vlm.config.schema import VLMConfig

RESULTS = Path(__file__).with_suffix(".json")
WORLD = "benchmarks/vlm_claims_world.py"
SEEDS = (0, 1, 2, 3, 4)
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t for so many paired seeds."""
KL = "trainer.regularisers=[{name: kl, beta: 0.01}]"
_FORM = "{name: tag_format, weight: 0.2}"

HEAD = """
# Presets where their claims live

The questions about shapes of [the other page](vlm_results.md) are too easy to tell presets apart. Here each preset is
put into the situation that its paper is about, beside plain GRPO (clip .2, z-scores of groups, the mean over an
answer's tokens) on the embedded models, with the same learning rate and the same number of sampled tokens. Against
GRPO, by the 95 % interval of the differences of paired seeds:
"""
READ = """
Of so many comparisons about one in twenty is expected to be called ahead or behind by chance. Seeds change questions
and sampled answers, not the model at the start. These are models of a million weights and 256 held-out questions (a
single figure has a standard error of up to .031): what shows here need not show at 7B, and the other way round.

Three seeds find large differences only. On `mixed` GRPO itself falls below the start, so that nothing can be said of
the others there. TW-GRPO's situation, several right options, could not be made: on `key_frames`, paid by the overlap
with the true frames, plain GRPO gives all answers of every group the same frames after 139 iterations (`indices` .292
before and .309 after 50 and after 100, right .074 and .066), since the embedded model does not find a colour among
four pictures ([why](vlm_tasks.md#what-was-measured)).
"""
AFTER = """
Made by `python -m benchmarks.vlm_claims` (`train`, then `report`) from `benchmarks/vlm_claims.json`; tasks and rewards
of these situations are in `benchmarks/vlm_claims_world.py`.
"""


@dataclass(frozen=True)
class Claim:
    """One situation. methods: changes of each, the first one is what the others are compared with. measure: the
    held-out figure, `also` is reported beside it."""

    title: str
    setting: str
    config: str
    changes: tuple[str, ...]
    methods: dict[str, tuple[str, ...]]
    measure: str = "accuracy"
    also: tuple[str, ...] = ()


CLAIMS = {
    "small": Claim(
        "VPPO: where perception is the bottleneck",
        "Small shapes under noise (a third of the area of those in `shapes`): to count is easy, to see is hard.",
        "quickstart",
        (f"task.name={WORLD}:small", "iterations=300"),
        {
            "grpo": ("trainer.preset=grpo", "trainer.regularisers=[]"),
            "dapo": (),
            "vppo": ("trainer.preset=vppo",),
        },
        also=("accuracy_blind",),
    ),
    "quality": Claim(
        "Q-Hawkeye: scores of picture quality",
        "The task of `q_hawkeye.yaml` with its rewards; GRPO has the same KL.",
        "q_hawkeye",
        (),
        {"grpo": ("trainer.preset=grpo", KL), "q_hawkeye": ()},
        also=("rating",),
    ),
    "consistency": Claim(
        "GRPO-CARE: does the answer follow from the reasoning?",
        "The task `shapes`. `agrees` is 1 if the last word of the reasoning is the answer; nobody trains on it.",
        "quickstart",
        (
            f"rewards=[{{name: exact}}, {_FORM}, {{name: '{WORLD}:agrees', weight: 0}}]",
            "iterations=300",
        ),
        {"grpo": ("trainer.preset=grpo", "trainer.regularisers=[]"), "grpo_care": ("trainer.preset=grpo_care",)},
        also=("agrees",),
    ),
    "difficulty": Claim(
        "Reg-GRPO with augmentation by difficulty",
        "The task `shapes`, two epochs for all. Augmented runs sample two to three times as many answers an iteration: "
        "they make 120 iterations, the others 300.",
        "quickstart",
        ("trainer.epochs=2",),
        {
            "grpo": ("trainer.preset=grpo", KL, "iterations=300"),
            "reg_grpo": ("trainer.preset=reg_grpo", KL, "iterations=300"),
            "reg_grpo_augmented": (
                "trainer.preset=reg_grpo",
                KL,
                'augmentation={truth: "{question} i see {answer} ."}',
                "iterations=120",
                "evaluation.every=10",
            ),
        },
    ),
    "mixed": Claim(
        "G2RPO: many tasks of unlike difficulty",
        "Jigsaws, boxes, quality scores, time series and key frames in one run, with rewards from 0 to 1 of unlike "
        "spread. Right is a reward of half or more.",
        "jigsaw",
        (
            f"task.name={WORLD}:mixed",
            f"rewards=[{{name: '{WORLD}:of_task'}}, {_FORM}]",
            "evaluation.right_at=0.5",
            "iterations=300",
        ),
        {
            "grpo": ("trainer.preset=grpo", "trainer.regularisers=[]"),
            "dr_grpo": ("trainer.preset=dr_grpo",),
            "g2rpo": ("trainer.preset=g2rpo",),
        },
        measure="of_task",
        also=("accuracy",),
    ),
    "noisy_judge": Claim(
        "StableReinforce: a noisy judge",
        "The task `better`. One verdict in ten is off by 10 points, up or down; the right letter is worth 1. The "
        "held-out figure is the share of right letters.",
        "stable_reinforce",
        (
            f"task.name={WORLD}:better",
            f"rewards=[{{name: choice, weight: 0}}, {{name: '{WORLD}:noisy_judge'}}]",
            "iterations=100",
            "evaluation.every=20",
        ),
        {
            "grpo": (
                *("trainer.preset=grpo", "trainer.regularisers=[]"),
                *("generation.group_size=8", "generation.prompts_per_iteration=16"),
            ),
            "reinforce_pp": ("trainer.preset=reinforce_pp",),
            "stable_reinforce": (),
        },
    ),
}


def plan(name: str, folder: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The methods of a claim, with its configuration and their changes."""
    claim = CLAIMS[name]
    yield from ((method, claim.config, claim.changes + changes) for method, changes in claim.methods.items())


def summary(run: Run, name: str) -> Summary:
    """Held-out figures of a claim over thousands of sampled tokens."""
    config, measures = load(run.config), (CLAIMS[name].measure, *CLAIMS[name].also)
    assert isinstance(config, VLMConfig)
    answers = config.generation.prompts_per_iteration * config.generation.group_size
    tokens, curves = 0.0, {name: list[tuple[float, float]]() for name in measures}
    for row in read_metrics(run.metrics):
        tokens += answers * row.get("rollout/rounds", 0.0) * row.get("rollout/tokens_mean", 0.0) / 1000
        for name, points in curves.items():
            key = f"eval/{name}" if name == "accuracy_blind" else f"eval/{name}_mean"
            if (value := row.get(key)) is not None:
                points.append((round(tokens, 1), round(value, 4)))
    return {"curves": curves}


def at(points: Sequence[tuple[float, float]], tokens: float) -> float:
    """The last figure that was measured within so many thousand tokens, or 3 % more: equal runs differ by that."""
    return [value for spent, value in points if spent <= 1.03 * tokens][-1]


def interval(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the differences of paired seeds, and its 95 % confidence interval by Student's t."""
    apart = [value - other for value, other in zip(values, base, strict=True)]
    half = STUDENT[len(apart)] * stdev(apart) / len(apart) ** 0.5
    return mean(apart), mean(apart) - half, mean(apart) + half


def verdict(low: float, high: float) -> str:
    return "ahead" if low > 0 else "behind" if high < 0 else "no difference shown"


@dataclass(frozen=True)
class Compared:
    """A method in a claim. start, each: its held-out figure before, and after the tokens that all methods of the claim
    had, by seed. apart: the mean difference from GRPO and its interval, None of GRPO itself."""

    method: str
    start: float
    each: list[float]
    also: dict[str, float]
    apart: tuple[float, float, float] | None


def compared(name: str, results: dict[str, Summary]) -> tuple[list[Compared], float]:
    """The methods of a claim, over the seeds that all of them have, and the thousands of tokens that are compared."""
    claim = CLAIMS[name]
    seeds = [s for s in SEEDS if all(f"{name}-{method}-{s}" in results for method in claim.methods)]
    if len(seeds) < 2:
        return [], 0.0
    curves = {method: [results[f"{name}-{method}-{s}"]["curves"] for s in seeds] for method in claim.methods}
    tokens = min(found[claim.measure][-1][0] for runs in curves.values() for found in runs)
    each = {method: [at(found[claim.measure], tokens) for found in runs] for method, runs in curves.items()}
    base = next(iter(each.values()))
    return [
        Compared(
            method,
            mean(found[claim.measure][0][1] for found in runs),
            each[method],
            {also: mean(at(found[also], tokens) for found in runs) for also in claim.also},
            interval(each[method], base) if each[method] is not base else None,
        )
        for method, runs in curves.items()
    ], tokens


def table(claim: Claim, found: Sequence[Compared]) -> str:
    also = "".join(f" | `{name}`, end" for name in claim.also)
    lines = [
        f"| preset | `{claim.measure}`, start → end (each seed) | difference from GRPO (95 %){also} |",
        "| --- " * (3 + len(claim.also)) + "|",
    ]
    for one in found:
        each = ", ".join(f"{value:.3f}" for value in one.each)
        apart = "" if one.apart is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*one.apart)
        cells = [f"`{one.method}`", f"{one.start:.3f} → **{mean(one.each):.3f}** ({each})", apart]
        lines.append(f"| {' | '.join(cells + [f'{value:.3f}' for value in one.also.values()])} |")
    return "\n".join(lines)


def page(results: dict[str, Summary]) -> str:
    """docs/vlm_claims.md: first what came of it, then each claim."""
    verdicts: dict[str, list[str]] = {"ahead": [], "behind": [], "no difference shown": []}
    parts = []
    for name, claim in CLAIMS.items():
        found, tokens = compared(name, results)
        if not found:
            continue
        for one in found:
            if one.apart is not None:
                text = "`{}` on `{}` ({:+.3f}, {:+.3f} to {:+.3f})".format(one.method, name, *one.apart)
                verdicts[verdict(*one.apart[1:])].append(text)
        seeds = f"{len(found[0].each)} seeds, {tokens:.0f} thousand tokens each."
        parts += [f"## {claim.title}", f"`{name}`. {claim.setting} {seeds}", table(claim, found)]
    summary = [f"- **{word}**: {'; '.join(texts) or 'none'}." for word, texts in verdicts.items()]
    return "\n\n".join([HEAD.strip(), "\n".join(summary), READ.strip(), *parts, AFTER.strip()]) + "\n"


if __name__ == "__main__":
    situations(__doc__, RESULTS, "claims", CLAIMS, SEEDS, plan, summary, page)
