"""The algorithm: answer, score, estimate over all answers, update. What a method is, its recipe says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives import decay
from genrl.runtime.loop import Loop
from genrl.runtime.recorded import Recorded
from genrl.vlm.methods.dealing import Update
from genrl.vlm.methods.extras import degraded_prompts
from genrl.vlm.methods.policy_loss import policy_loss
from genrl.vlm.policies.policy import Encoded, Replay
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.regularisers import Perception
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.run import AnswersRun, Estimated

ON_POLICY = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""How far a log-probability may be from that before the update where nothing was trained yet."""

NAMES = {
    "entropy": "entropy/sampled",
    "policy_entropy": "entropy/policy",
    "ratio_mean": "ratio/mean",
    "ratio_max": "ratio/max",
    "clipped": "ratio/clipped",
    "kl_k2": "kl",
    "kl_k3": "kl",
    "kl_k3_clamped": "kl",
    "drift": "ratio/drift",
}
"""From what `policy_loss` measures to the catalogue of metrics."""
NORMS = {"policy": "grad_norm", "critic": "grad_norm/critic"}
"""The same, from groups of parameters to the norms of their gradients."""


def train(run: AnswersRun, settings: RecipeMethod) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        answers, row = run.draw()
        ready = run.estimate(answers)
        if ready is not None:
            found = ready.found.metrics
            row |= {"advantage/abs_mean": found["advantage_abs_mean"]}
            row |= {name: found[name] for name in ("zero_std_ratio", "group_std_mean") if name in found}
            gaps = {name.replace("_", "/", 1): value for name, value in found.items() if name.startswith("sampler_")}
            row |= {} if run.bounds else gaps
            row |= learn(run, answers, ready)
        row["lr"] = run.loop.lr
        run.loop.finish(row)


def learn(run: AnswersRun, answers: Answers, ready: Estimated) -> dict[str, float]:
    """The optimiser steps of an iteration; means of what they measured."""
    loop, settings = run.loop, cast(RecipeMethod, run.config.trainer)
    assert run.preset is not None, "a method of this folder has one"
    preset = annealed(run.preset, loop.iteration, run.config.iterations)
    changed = degraded_prompts(run.policy, answers, run.config, loop.iteration) if "degraded" in run.reads else None

    def scored(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        now = forward(run, answers.prompts, answers, rows, entropy="entropy" in run.reads)
        extra = {} if now.entropy is None else {"policy_entropy": now.entropy.cpu()}
        if changed is not None:
            with torch.no_grad():
                extra["degraded"] = forward(run, changed, answers, rows).log_prob.cpu()
        return now.log_prob, extra

    figures: dict[str, list[float]] = defaultdict(list)
    loop.phase("training", settings.epochs * len(answers.texts))
    with loop.timed("train"):
        for _ in range(settings.epochs):
            for one in ready.updates:
                dtype = run.policy.model.dtype
                found = update(loop, preset, ready.batch, one, scored, dtype=dtype, settings=settings)
                if run.average is not None:
                    run.average.step()
                for name, value in found.items():
                    figures[name].append(value)
    return {name: sum(values) / len(values) for name, values in figures.items()}


def update(
    loop: Loop,
    preset: Preset,
    batch: TokenBatch,
    one: Update,
    scored: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
    *,
    dtype: torch.dtype,
    settings: Any,
    groups: Sequence[str] = ("policy",),
) -> dict[str, float]:
    """One optimiser step. The loss is the sum of those of the micro-batches of all processes.

    batch: this process's rows, estimated. scored: log-probabilities [b, T] of some of its rows under the weights as
    they are, and what else the loss reads of them. settings: the method's, for a dump. groups: of parameters
    that are stepped.
    """
    fresh = loop.updates == 0
    sums: dict[str, float] = defaultdict(float)
    most, error, seen = 0.0, 0.0, 0
    for k in range(one.passes):
        loss, evidence = torch.zeros(()), {}
        if k < len(one.parts):  # else it is another process that has the last ones
            rows = one.parts[k]
            part = replace(batch.select(rows), rows=one.rows, tokens=one.tokens, groups=one.groups)
            log_prob, extra = scored(rows)
            part = part.with_log_prob(log_prob.cpu(), extra)
            result = policy_loss(preset, part)
            loss = result.loss
            assert part.old_log_prob is not None and part.log_prob is not None
            number = int(part.mask.sum())
            if number:
                apart = (part.log_prob.detach() - part.old_log_prob)[part.mask]
                error = max(error, float(apart.abs().max()) if fresh else 0.0)
                sums["drift"] -= float(apart.sum())
            for name, value in result.metrics.items():
                if name == "ratio_max":
                    most = max(most, float(value))
                else:  # parts of the loss add up; the others are means over the part's tokens
                    sums[name] += float(value) * (1 if name.startswith("loss/") else number)
            seen += number
            sums["loss"] += float(loss.detach())
            evidence = {"log_prob": part.log_prob.detach(), "old_log_prob": part.old_log_prob}
            evidence |= {} if part.advantage is None else {"advantage": part.advantage}
        loop.backward(settings, {"loss": loss}, Recorded(None, evidence))
        loop.advance(0 if k >= len(one.parts) else len(one.parts[k]))
    found = _joint(sums, most, error, seen)
    check_on_policy(found.pop("error"), dtype)
    norms = loop.step(groups)
    return found | {NORMS[name]: norm for name, norm in norms.items()}


def forward(
    run: AnswersRun, prompts: list[Encoded], answers: Answers, rows: Tensor, *, entropy: bool = False
) -> Replay:
    """Log-probabilities and entropies [b, T] of some answers under the weights as they are."""
    return run.policy.log_probs(
        prompts,
        answers.tokens[rows],
        answers.mask[rows],
        group=answers.group[rows],
        temperature=run.config.generation.temperature,
        entropy=entropy,  # as for `old`: the same operations give the same bits
    )


def _joint(sums: dict[str, float], most: float, error: float, seen: int) -> dict[str, float]:
    every = gather_object([{"sums": dict(sums), "most": most, "error": error, "seen": seen}])
    tokens = max(1, sum(one["seen"] for one in every))
    found = {"error": max(one["error"] for one in every)}
    for name in dict.fromkeys(name for one in every for name in one["sums"]):
        total = sum(one["sums"].get(name, 0.0) for one in every)
        mean = total if name == "loss" or name.startswith("loss/") else total / tokens
        found[NAMES.get(name, name)] = mean
    if "ratio/mean" in found:
        found["ratio/max"] = max(one["most"] for one in every)
    return found


def check_on_policy(error: float, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless the first update's log-probabilities are those that its ratios compare with."""
    if not error <= ON_POLICY[dtype]:
        raise RuntimeError(
            "the model assigns different log-probabilities to the answers it has just generated: they are "
            f"{error:.2g} off before any update. Look for dropout, statistics that change, or another "
            "device or precision."
        )


def annealed(preset: Preset, iteration: int, iterations: int) -> Preset:
    """Q-Hawkeye: the weight of the perception loss falls by half a cosine over the run; others stay as they are."""
    if not any(isinstance(one, Perception) for one in preset.regularisers):
        return preset
    factor = decay.cosine(iteration, initial=1.0, final=0.0, total_steps=iterations)
    changed = [
        one.model_copy(update={"gamma": one.gamma * factor}) if isinstance(one, Perception) else one
        for one in preset.regularisers
    ]
    return replace(preset, regularisers=tuple(changed))
