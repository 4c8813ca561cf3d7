"""VeriFree (arXiv 2505.21493): answer, put the right answer in the place of the own, update.

    R = prod p(y* | x, z),   L = -A sum_z l - R sum_y* l,   A = R - mean of the others' R

z is the model's reasoning up to the opening `<answer>`, y* what follows it in the right row, the end included, l
log-probabilities; no ratio. By the product rule the gradient is that of the expected R. An answer without `<answer`
has R = 0 and is all reasoning, as in the authors' script.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from genrl.objectives.token_advantages import leave_one_out
from genrl.objectives.tokens import per_token
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.extras import reasoning
from genrl.vlm.methods.verifree.settings import VeriFree
from genrl.vlm.policies.folder import gathered
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.run import AnswersRun

loss = answering.loss


def train(run: AnswersRun, settings: VeriFree) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        sampled, row = run.draw()
        with run.loop.timed("estimate"), run.loop.fitting():
            answers, right, paid = completed(run.policy, sampled, run.config.generation.temperature, settings)
        run.loop.check_stop()
        ready = run.estimate(answers)
        if ready is not None:
            gain = leave_one_out(paid, answers.group)
            assert ready.batch.advantage is not None
            of_rewards = per_token(ready.batch.advantage, answers.mask).expand(answers.mask.shape)
            advantage = torch.where(right, paid[:, None], of_rewards + gain[:, None])
            ready = ready._replace(batch=replace(ready.batch, advantage=advantage))
            row |= answering.estimated(run, ready) | figures(right, paid, gain)
            row |= answering.learn(run, answers, ready)
        run.finish(row)


@torch.no_grad()
def completed(
    policy: Policy, answers: Answers, temperature: float, settings: VeriFree
) -> tuple[Answers, Tensor, Tensor]:
    """The answers with the right one in the place of the own, which of their tokens are its, bool [B, T], and how
    likely these are together under the weights as they are, float64 [B]."""
    tokens, sampler, begins = [], [], list[int]()
    for k, number in enumerate(answers.group.tolist()):
        row, said = answers.rows[number], answers.tokens[k][answers.mask[k]]
        before, rest = reasoning(policy, said), said[:0]
        sampler.append(answers.sampler_log_prob[k][answers.mask[k]][: None if before is None else len(before)])
        if before is not None:
            text = f"<answer> {row.columns['answer']} </answer>"
            right = answer_ids(row.prompt, text, policy.processor, policy.stop_ids)
            # what lies across the border of the opening tag belongs to the answer
            ends = np.cumsum([len(policy.tokenizer.decode([token])) for token in right.tolist()])
            opening = int((ends <= len("<answer>")).sum())
            before, rest = torch.cat([before, right[:opening]]), right[opening:]
        tokens.append(torch.cat([said if before is None else before, rest]))
        begins.append(len(tokens[-1]) - len(rest))
    mask = pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True).bool()
    padded = pad_sequence(tokens, batch_first=True)
    right = mask & (torch.arange(mask.shape[1]) >= torch.tensor(begins)[:, None])
    now = torch.zeros(mask.shape)
    with gathered(policy):
        for rows in torch.arange(len(mask)).split(settings.rows_per_pass or len(mask)):
            part = policy.log_probs(
                answers.prompts, padded[rows], mask[rows], group=answers.group[rows], temperature=temperature
            )
            now[rows] = part.log_prob.float().cpu()
    paid = (now.double() * right).sum(1).exp() * right.any(1)
    # what was not sampled has no other probability than the model's
    sampled = torch.arange(mask.shape[1]) < torch.tensor([[len(one)] for one in sampler])
    said_so = torch.zeros(mask.shape).masked_scatter(sampled, torch.cat(sampler).float())
    changed = replace(answers, tokens=padded, mask=mask, sampler_log_prob=torch.where(sampled, said_so, now))
    return changed, right, paid


def figures(right: Tensor, paid: Tensor, gain: Tensor) -> dict[str, float]:
    """Means over the answers of all processes."""
    sums = gather_object([(float(paid.sum()), int(right.any(1).sum()), float(gain.abs().sum()), len(paid))])
    probability, placed, size, number = (sum(part) for part in zip(*sums, strict=True))
    rows = max(1, number)
    return {"right/probability": probability / rows, "right/placed": placed / rows, "advantage/abs_mean": size / rows}
