"""Answers that a model is taught: of a row's columns, and the tokens that it would have to sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from genrl.vlm.config.schema import PLACE
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.rollout.data import Questions
from genrl.vlm.tasks.rows import Row

TOGETHER = 16
"""Questions of an evaluation in one pass."""


class Told(NamedTuple):
    """Questions with their answers: tokens int64 [B, T], mask bool [B, T], padded on the right."""

    prompts: list[Encoded]
    tokens: Tensor
    mask: Tensor

    @property
    def positions(self) -> int:
        """That a model reads to score the answers, without padding: the last token of an answer is read by nobody."""
        return sum(prompt.length for prompt in self.prompts) + int(self.mask.sum()) - len(self.prompts)


def target_of(row: Row, target: str) -> str:
    """The answer that a row teaches: a column, or a text with columns in braces. Raises ValueError for a column that is
    not there, or holds nothing."""

    def column(name: str) -> str:
        found = row.columns.get(name)
        if found is None or not str(found).strip():
            have = ", ".join(row.columns) or "none"
            text = f"the column {name!r} is to be the answer (trainer.target), and holds {found!r}"
            raise ValueError(f"{row.name}: {text}; columns: {have}")
        return str(found)

    return PLACE.sub(lambda place: column(place[1]), target) if "{" in target else column(target)


def tell(policy: Policy, rows: Sequence[Row], target: str) -> Told:
    """Rows as a loss takes them. Raises ValueError naming the row whose answer cannot be taught: no text, the token of
    a place for an image in it, or more tokens than the model has positions."""
    prompts, answers = [], []
    for row in rows:
        prompt = policy.encode(row.prompt)
        ids = answer_ids(row.prompt, target_of(row, target), policy.processor, policy.stop_ids)
        policy.check_room([prompt], len(ids))
        if held := sorted(set(ids.tolist()) & set(policy.forbidden.tolist())):
            words = policy.tokenizer.convert_ids_to_tokens(held)
            raise ValueError(f"{row.name}: the answer holds {words[0]!r}, which stands for an image")
        prompts.append(prompt)
        answers.append(ids)
    if not answers:
        return Told([], torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.bool))
    mask = pad_sequence([torch.ones_like(ids) for ids in answers], batch_first=True).bool()
    return Told(prompts, pad_sequence(answers, batch_first=True), mask)


@torch.no_grad()
def held_out_loss(
    policy: Policy, questions: Questions, numbers: Sequence[int], target: str, advance: Callable[[int], None]
) -> tuple[float, float, int]:
    """Sum of the negative log-probabilities of the tokens of these questions' answers, that of their squares, and how
    many tokens."""
    total, squares, tokens = 0.0, 0.0, 0
    for start in range(0, len(numbers), TOGETHER):
        told = tell(policy, [questions[number] for number in numbers[start : start + TOGETHER]], target)
        each = torch.arange(len(told.prompts))
        log_prob = policy.log_probs(*told, group=each, share_prefix=False).log_prob.double()
        total, squares = total - float(log_prob.sum()), squares + float(log_prob.square().sum())
        tokens += int(told.mask.sum())
        advance(len(told.prompts))
    return total, squares, tokens
