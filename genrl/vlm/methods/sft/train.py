"""Supervised fine-tuning on answers that are given.

    L = -1/N sum_b sum_t log pi(y[b,t] | x[b], y[b,<t])         N: tokens of all answers of the optimiser step

over the tokens of the answer alone, its end included; question, system message and pictures are read, not learnt. N is
that of all micro-batches and processes, so the split into them changes nothing but rounding. With `first_token_share`
a, as PaCo-Reward (arXiv 2512.04784) has it, the n tokens of an answer weigh n a and n (1 - a) / (n - 1) instead of 1.
With `preference` the loss is that of pairs of answers or of marked ones (`preferences`), a mean over them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.tokens import aggregate
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Results, descend, summed
from genrl.vlm.config.schema import VLMConfig, columns_of
from genrl.vlm.methods.sft import preferences
from genrl.vlm.methods.sft.settings import VLMSFT
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.shards import idle_pass
from genrl.vlm.rollout.data import Questions, tell
from genrl.vlm.rollout.recorded import Asked
from genrl.vlm.run import AnswersRun

logger = logging.getLogger(__name__)


def train(run: AnswersRun, settings: VLMSFT) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        row = learn(run, settings)
        run.finish(row)


def learn(run: AnswersRun, settings: VLMSFT) -> dict[str, float]:
    """The optimiser steps of an iteration, and what they measured; questions come in passes over all of them, each in
    an order of its own."""
    loop, size, key = run.loop, settings.batch_size, f"taught/{run.stage}"
    number = len(run.questions.kept) if settings.updates is None else settings.updates * size
    first = loop.memory.get(key, 0)
    numbers = run.questions.asked(loop.iteration, first, number)
    loop.memory |= {key: first + number}
    loop.phase("training", number // loop.process.accelerator.num_processes)
    sums: dict[str, float] = defaultdict(float)
    with loop.timed("train"):
        batches = [numbers[start : start + size] for start in range(0, number, size)]
        for batch in batches:
            for name, value in update(run, settings, batch).items():
                sums[name] += value
    return {
        "loss": sums["loss"] / len(batches),
        "grad_norm": sums["norm"] / len(batches),
        "target/tokens_mean": sums["tokens"] / number,
        "target/padding": 1 - sums["there"] / max(1.0, sums["computed"]),
    } | {name: value / len(batches) for name, value in sums.items() if name.startswith("preference/")}


def update(run: AnswersRun, settings: VLMSFT, batch: list[int]) -> dict[str, float]:
    """One optimiser step, and figures of all processes: its loss and the gradient's norm, and numbers of tokens."""
    loop, accelerator = run.loop, run.loop.process.accelerator
    rows = [run.questions[number] for number in batch[accelerator.process_index :: accelerator.num_processes]]
    told, wanted = tell(run.policy, rows, *settings.targets), settings.preference
    judged = None if wanted is None else preferences.Judged.of(run, settings, rows, told)
    learnt = torch.arange(len(rows)) if judged is None else judged.rows
    parts = list(learnt.split(settings.rows_per_pass)) if len(learnt) else []
    every = gather_object([(len(parts), int(told.mask.sum()) if judged is None else judged.tokens(told), len(learnt))])
    most, tokens, pairs = max(n for n, *_ in every), sum(n for _, n, _ in every), sum(n for *_, n in every)
    parts += [torch.zeros(0, dtype=torch.int64)] * (most - len(parts))  # another process has the last ones
    sums = defaultdict(float, {"loss": 0.0, "computed": 0.0, "there": float(told.positions)})

    def prepare(part: Tensor) -> Recorded | None:
        if not len(part):
            return None
        given = preferences.recorded(told, part, tokens=tokens)
        return given if judged is None or wanted is None else judged.added(wanted, given, part, pairs)

    def measure(part: Tensor, results: Results, given: Recorded) -> None:
        for name in results.keys() - {"log_prob"}:
            sums[name] += float(results[name].detach())

    idle = partial(idle_pass, run.policy)
    norms = descend(
        loop, settings, run.policy, parts, prepare, loss, groups=["policy"], done=len, measure=measure, idle=idle
    )
    figures = summed(sums) | {"tokens": float(tokens), "norm": norms["policy"]}
    if judged is not None:
        figures |= {"preference/equal": 1 - pairs / len(batch), "preference/baseline": judged.baseline}
    return figures


def loss(settings: VLMSFT, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the update's loss, [], and its log-probabilities [b, T]."""
    batch: Asked = given.batch
    answers, answered = given["answers"], given["answered"]
    now = policy.log_probs(batch.prompts, answers, answered, group=batch.group, share_prefix=False)
    measured = {"log_prob": now.log_prob, "computed": torch.tensor(now.positions)}
    if settings.preference is not None:
        return preferences.loss(settings.preference, now, given) | measured
    answered = answered.to(now.log_prob.device)
    nats = -now.log_prob
    if settings.first_token_share is not None:
        nats = nats * token_weights(answered, settings.first_token_share)
    return {"loss": aggregate(nats, answered, "token_mean_global", tokens=int(given["tokens"]))} | measured


def check(config: VLMConfig, policy: Policy) -> None:
    """Raises ValueError for data whose rows are no preferences, before anything is trained."""
    settings = cast(VLMSFT, config.trainer)
    if settings.preference is not None and config.task.name is None:
        logger.info("task.train: %s", preferences.survey(settings, Questions(config, "train")))


@torch.no_grad()
def evaluate(run: AnswersRun) -> dict[str, float]:
    """The share of held-out pairs that are in order, where these questions have the columns."""
    whole: VLMConfig = run.loop.config
    settings, questions = cast(VLMSFT, whole.trainer), Questions(whole, "eval")
    wanted, columns = settings.preference, {name for target in settings.targets for name in columns_of(target)}
    if wanted is None or not wanted.of_pairs or not columns <= questions[0].columns.keys():
        return {}
    mine, right, number = run.process.share(len(questions)), 0.0, 0
    run.loop.phase("evaluating", len(mine))
    for start in range(0, len(mine), settings.rows_per_pass):
        rows = [questions[k] for k in mine[start : start + settings.rows_per_pass]]
        told = tell(run.policy, rows, *settings.targets)
        judged = preferences.Judged.of(run, settings, rows, told)
        if len(judged.rows):
            given = judged.added(wanted, preferences.recorded(told, judged.rows, tokens=1), judged.rows, 1)
            right += float(loss(settings, run.policy, given)["preference/right"])
        number += len(judged.rows)
        run.loop.advance_or_leave(len(rows))
    every = gather_object([(right, number)])
    count = max(1, sum(n for _, n in every))
    mean = sum(r for r, _ in every) / count
    return {"eval/preference_right": mean, "eval/preference_se": (mean * (1 - mean) / count) ** 0.5}


def token_weights(answered: Tensor, first: float) -> Tensor:
    """[b, T] of a mask padded on the right: n first, then n (1 - first) / (n - 1), in sum n; 1 where n is 1."""
    number = answered.sum(1, keepdim=True).float()
    weights = (number * (1 - first) / (number - 1).clamp_min(1)).repeat(1, answered.shape[1])
    weights[:, :1] = torch.where(number > 1, number * first, 1.0)
    return weights
