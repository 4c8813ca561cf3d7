"""On-policy distillation of language models: answer, let a teacher read the answers, estimate, update.

    sampled       A[b,t] = c_r A[b] + c (l_T - l)[b,t], l_T and l log-probs of the sampled token under teacher and model
    distribution  L = L_preset(c_r A) + c D(model, teacher), D by whole distributions (`teaching.py`)

The first is the policy gradient of the reverse KL, by any surrogate; the gap is neither centred nor divided. Groups
whose rewards are equal, and answers that were cut, teach too. docs/opd_language.md
"""

from __future__ import annotations

from dataclasses import replace

from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.policy_losses import kl_k3
from genrl.objectives.tokens import aggregate, log_ratio, masked, per_token
from genrl.runtime.loop.recorded import Recorded
from genrl.vlm.common import Estimated
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.extras import replayed
from genrl.vlm.methods.opd.settings import LanguageOPD
from genrl.vlm.methods.opd.teaching import Teachers, divergence, gap_advantage
from genrl.vlm.methods.policy_loss import recipe_loss
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.recorded import Asked
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.run import AnswersRun


def train(run: AnswersRun, settings: LanguageOPD) -> None:
    """All iterations that are left."""
    teachers = Teachers(run, settings)
    for _ in run.loop.iterations():
        answers, row = run.draw()
        ready = run.estimate(answers)
        if ready is not None:
            row |= answering.estimated(run, ready)
            ready, figures = taught(run, settings, teachers, answers, ready)
            row |= figures | answering.learn(run, answers, ready, loss)
        run.finish(row)


def taught(
    run: AnswersRun, settings: LanguageOPD, teachers: Teachers, answers: Answers, ready: Estimated
) -> tuple[Estimated, dict[str, float]]:
    """Estimates with what the teachers say, and figures of all processes."""
    batch, temperature = ready.batch, run.config.generation.temperature
    parts = [part for update in ready.updates for part in update.parts]
    with run.loop.timed("estimate"), run.loop.fitting():
        teacher = teachers.said(answers, parts, temperature)
        old = batch.old_log_prob
        if old is None:  # one update on policy needs none otherwise
            old = replayed(run.policy, answers.prompts, answers, parts, temperature)[0]
    run.loop.check_stop()
    assert batch.advantage is not None
    advantage = settings.reward_coef * per_token(batch.advantage, batch.mask).expand(batch.mask.shape)
    extra = dict(batch.extra)
    if teacher.ids is None or teacher.rows is None:
        advantage = gap_advantage(advantage, old, teacher.log_prob, batch.mask, coef=settings.coef)
    else:
        extra |= {"teacher_ids": teacher.ids, "teacher_rows": teacher.rows}
    ready = ready._replace(batch=replace(batch, advantage=advantage, extra=extra))
    return ready, figures(old, teacher.log_prob, batch.mask)


def figures(old: Tensor, teacher: Tensor, mask: Tensor) -> dict[str, float]:
    """Estimates of the KL from the model to its teacher, over the tokens of all processes."""
    gap, k3 = log_ratio(old, teacher, mask), masked(kl_k3(old, teacher), mask)
    every = gather_object([(float(gap.sum()), float(k3.sum()), int(mask.sum()))])
    tokens = max(1, sum(count for *_, count in every))
    return {"teacher/gap": sum(g for g, *_ in every) / tokens, "teacher/k3": sum(k for _, k, _ in every) / tokens}


def loss(settings: LanguageOPD, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the update's loss, [], its log-probabilities [b, T], and figures."""
    if settings.estimator == "sampled":
        return answering.loss(settings, policy, given)
    batch: Asked = given.batch
    assert batch.preset is not None, "a method of answers has one"
    tokens, mask = given["answers"], given["answered"]
    now = policy.log_probs(batch.prompts, tokens, mask, group=batch.group, temperature=batch.temperature)
    result = recipe_loss(batch.preset, now.log_prob.cpu(), {}, given)
    teacher = (given["extra/teacher_ids"], given["extra/teacher_rows"])
    far = divergence(settings, policy, now.states, given["answered"], *teacher, batch.temperature)
    totals = {"rows": int(given["rows"]), "tokens": int(given["tokens"]), "length": batch.preset.length}
    term = settings.coef * aggregate(far.cpu(), given["answered"].cpu(), batch.preset.aggregation, **totals)
    return result | {"loss": result["loss"] + term, "loss/distill": term.detach()}
