"""Supervised fine-tuning on answers that are given.

    L = -1/N sum_b sum_t log pi(y[b,t] | x[b], y[b,<t])         N: tokens of all answers of the optimiser step

over the tokens of the answer alone, its end included; question, system message and pictures are read, not learnt. N is
that of all micro-batches and processes, so the split into them changes nothing but rounding. With `first_token_share`
a, as PaCo-Reward (arXiv 2512.04784) has it, the n tokens of an answer weigh n a and n (1 - a) / (n - 1) instead of 1.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.tokens.token_aggregation import aggregate
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Results, descend, summed
from genrl.vlm.methods.sft.settings import VLMSFT
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.shards import idle_pass
from genrl.vlm.rollout.data import Told, tell
from genrl.vlm.rollout.recorded import Asked
from genrl.vlm.run import AnswersRun


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
        "target/padding": 1 - sums["there"] / sums["computed"],
    }


def update(run: AnswersRun, settings: VLMSFT, batch: list[int]) -> dict[str, float]:
    """One optimiser step, and figures of all processes: its loss and the gradient's norm, and numbers of tokens."""
    loop, accelerator = run.loop, run.loop.process.accelerator
    rows = [run.questions[number] for number in batch[accelerator.process_index :: accelerator.num_processes]]
    demonstrations = tell(run.policy, rows, settings.target)
    parts = list(torch.arange(len(rows)).split(settings.rows_per_pass)) if rows else []
    every = gather_object([(len(parts), int(demonstrations.mask.sum()))])
    most, tokens = max(n for n, _ in every), sum(n for _, n in every)
    parts += [torch.zeros(0, dtype=torch.int64)] * (most - len(parts))  # another process has the last ones
    sums = {"loss": 0.0, "computed": 0.0, "there": float(demonstrations.positions)}

    def prepare(part: Tensor) -> Recorded | None:
        return recorded(demonstrations, part, tokens=tokens) if len(part) else None

    def measure(part: Tensor, results: Results, given: Recorded) -> None:
        sums["loss"] += float(results["loss"].detach())
        sums["computed"] += float(results["computed"])

    idle = partial(idle_pass, run.policy)
    norms = descend(
        loop, settings, run.policy, parts, prepare, loss, groups=["policy"], done=len, measure=measure, idle=idle
    )
    return summed(sums) | {"tokens": float(tokens), "norm": norms["policy"]}


def recorded(told: Told, rows: Tensor, *, tokens: int) -> Recorded:
    """What the loss of some rows is made of. tokens: those of all answers of the update."""
    longest = int(told.mask[rows].sum(1).max())
    batch = Asked([told.prompts[number] for number in rows.tolist()], torch.arange(len(rows)), temperature=1.0)
    tensors = {"answers": told.tokens[rows, :longest], "answered": told.mask[rows, :longest]}
    return Recorded(batch, tensors | {"tokens": torch.tensor(tokens)})


def loss(settings: VLMSFT, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the update's loss, [], and its log-probabilities [b, T]."""
    batch: Asked = given.batch
    answers, answered = given["answers"], given["answered"]
    now = policy.log_probs(batch.prompts, answers, answered, group=batch.group, share_prefix=False)
    answered = answered.to(now.log_prob.device)
    nats = -now.log_prob
    if settings.first_token_share is not None:
        nats = nats * token_weights(answered, settings.first_token_share)
    total = aggregate(nats, answered, "token_mean_global", tokens=int(given["tokens"]))
    return {"loss": total, "log_prob": now.log_prob, "computed": torch.tensor(now.positions)}


def token_weights(answered: Tensor, first: float) -> Tensor:
    """[b, T] of a mask padded on the right: n first, then n (1 - first) / (n - 1), in sum n; 1 where n is 1."""
    number = answered.sum(1, keepdim=True).float()
    weights = (number * (1 - first) / (number - 1).clamp_min(1)).repeat(1, answered.shape[1])
    weights[:, :1] = torch.where(number > 1, number * first, 1.0)
    return weights
