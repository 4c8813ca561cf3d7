"""The algorithm: answer, score, estimate over all answers, update. What a method is, its recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from genrl.objectives import matching
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter
from genrl.vlm.common import Estimated
from genrl.vlm.engines.generation import uses_engine
from genrl.vlm.methods.extras import degraded_prompts
from genrl.vlm.methods.policy_loss import recipe_loss, sampler_figures
from genrl.vlm.methods.updates import Asked, Update, token_tensors, update
from genrl.vlm.policies.contract import Estimating
from genrl.vlm.policies.folder import idle_pass
from genrl.vlm.policies.policy import Encoded, Policy, Replay, dtype_of
from genrl.vlm.recipe.losses import Perception
from genrl.vlm.recipe.method import RecipeMethod
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.run import AnswersRun


def train(run: AnswersRun, settings: RecipeMethod) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        answers, row = run.draw()
        ready = run.estimate(answers)
        # None where a filter left nothing: the iteration is logged all the same, and counted as an idle one.
        if ready is not None:
            row |= estimated(run, ready)
            row |= learn(run, answers, ready)
        run.finish(row)


def estimated(run: AnswersRun, ready: Estimated) -> dict[str, float]:
    """Figures of what was estimated."""
    metrics = ready.estimate.metrics
    row = {"advantage/abs_mean": metrics["advantage_abs_mean"]}
    row |= {name: metrics[name] for name in ("zero_std_ratio", "group_std_mean") if name in metrics}
    return row | ({} if run.bounds else sampler_figures(metrics, differs=run.age > 0 or uses_engine(run.policy)))


def learn(run: AnswersRun, answers: Answers, ready: Estimated, own: Loss | None = None) -> dict[str, float]:
    """The optimiser steps of an iteration; means of what they measured. own: a method's loss, None = that below."""
    loop, settings = run.loop, cast(RecipeMethod, run.config.trainer)
    assert run.preset is not None, "a method of this folder has one"
    preset = annealed(run.preset, loop.iteration, run.config.iterations)
    changed = degraded_prompts(run.policy, answers, run.config, loop.iteration) if "degraded" in run.reads else None

    idle = partial(idle_pass, run.policy, 0 if changed is None else 1)
    round_of_noise = run.policy.round if isinstance(run.policy, Estimating) else ()
    prompts, of_row = answers.asked

    def recorded(one: Update, rows: Tensor) -> Recorded:
        asked = Asked(prompts, of_row[rows], run.config.generation.temperature, preset, changed, round_of_noise)
        tensors = token_tensors(one.part(ready.batch, rows))
        return Recorded(asked, tensors | {"answers": answers.tokens[rows], "answered": answers.mask[rows]})

    meter, dtype, own = Meter(), dtype_of(run.config), own or loss
    loop.phase("training", settings.epochs * len(answers.texts))
    with loop.timed("train"):
        for _ in range(settings.epochs):
            for one in ready.updates:
                figures = update(loop, settings, run.policy, one, recorded, own, dtype=dtype, idle=idle)
                meter.note(figures)
                if run.average is not None:
                    run.average.step()
    return meter.result()


def loss(settings: RecipeMethod, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the update's loss, [], its log-probabilities [b, T], and figures."""
    batch: Asked = given.batch
    assert batch.preset is not None, "a method of this folder has one"
    if isinstance(policy, Estimating):
        policy.round = batch.round

    def answered(prompts: Sequence[Encoded], *, entropy: bool = False) -> Replay:
        return policy.log_probs(
            prompts,
            given["answers"],
            given["answered"],
            group=batch.group,
            temperature=batch.temperature,
            entropy=entropy,  # as for `old`: the same operations give the same bits
        )

    now = answered(batch.prompts, entropy="entropy" in batch.preset.reads)
    extra = {} if now.entropy is None else {"policy_entropy": now.entropy.cpu()}
    if batch.changed is not None:
        with torch.no_grad():
            extra["degraded"] = answered(batch.changed).log_prob.cpu()
    # On the CPU: a few numbers per token, in float32, next to the statistics of the whole batch that were made there.
    return recipe_loss(batch.preset, now.log_prob.cpu(), extra, given)


def annealed(preset: Preset, iteration: int, iterations: int) -> Preset:
    """Q-Hawkeye: the weight of the perception loss falls by half a cosine over the run; others stay as they are."""
    if not any(isinstance(regulariser, Perception) for regulariser in preset.regularisers):
        return preset
    factor = matching.cosine(iteration, initial=1.0, final=0.0, total_steps=iterations)
    changed = [
        regulariser.model_copy(update={"coefficient": regulariser.coefficient * factor})
        if isinstance(regulariser, Perception)
        else regulariser
        for regulariser in preset.regularisers
    ]
    return replace(preset, regularisers=tuple(changed))
