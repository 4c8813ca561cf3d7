"""Preferences in place of answers: which pairs are learnt, what the model before training says of them, and the loss.

    h = sum_t log pi(y_t | x) - log pi_0(y_t | x)           of an answer y, pi_0: the model before training
    L = 1/P sum over pairs of f(h of the preferred, h of the other), or of marked answers of f(h, good, z)
        - sft_weight mean over tokens of the preferred answers of log pi

f by name: `objectives.preferences`. z is KTO's baseline, the mean h of the answers of a batch to others of
its questions, before the step and without gradient. P is the number of pairs of all micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.preferences import marked_loss, pair_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.vlm.methods.sft.settings import VLMSFT, Preference
from genrl.vlm.policies.policy import Policy, Replay
from genrl.vlm.rollout.data import Questions, Told, target_of
from genrl.vlm.rollout.recorded import Asked
from genrl.vlm.run import AnswersRun
from genrl.vlm.tasks import Row

MARKS = {True: True, False: False, "true": True, "false": False}  # and 1 and 0, which equal these


class Judged(NamedTuple):
    """Questions with pairs, or marked answers. rows int64 [n]: those that are learnt; good bool [N]: by question,
    whether its first answer is liked; baseline: KTO's."""

    run: AnswersRun
    rows: Tensor
    good: Tensor
    baseline: float

    @classmethod
    def of(cls, run: AnswersRun, settings: VLMSFT, rows: Sequence[Row], told: Told) -> Self:
        """All processes call it alike."""
        wanted, number = settings.preference, len(rows)
        assert wanted is not None
        if wanted.of_pairs:
            halves = [one.split(number) if number else (one[:0], one[:0]) for one in (told.tokens, told.mask)]
            unlike = torch.stack([(first != second).any(1) for first, second in halves]).any(0)
            return cls(run, unlike.nonzero()[:, 0], torch.ones(number, dtype=torch.bool), 0.0)
        good = torch.tensor([mark_of(row, wanted.mark) for row in rows], dtype=torch.bool)
        z = baseline(run, told, settings.rows_per_pass) if wanted.loss == "kto" else 0.0
        return cls(run, torch.arange(number), good, z)

    def tokens(self, told: Told) -> int:
        """Number of tokens of the preferred answers that are learnt."""
        return int(told.mask[self.rows][self.good[self.rows]].sum())

    def added(self, wanted: Preference, given: Recorded, part: Tensor, number: int) -> Recorded:
        """What the loss of these questions further reads. number: of those that are learnt in the step."""
        tensors = {"good": self.good[part], "baseline": torch.tensor(self.baseline), "number": torch.tensor(number)}
        if wanted.loss != "orpo":
            with torch.no_grad(), before_training(self.run) as model:
                tensors["ref"] = total(model, given).cpu()
        return Recorded(given.batch, {**given.tensors, **tensors})


@contextmanager
def before_training(run: AnswersRun) -> Iterator[Policy]:
    """The model before training: a second one, or the policy without its LoRA."""
    if run.reference is not None:
        yield run.reference
    else:
        with run.policy.reference():
            yield run.policy


def total(model: Policy, given: Recorded) -> Tensor:
    """Log-probability of each answer, [B]."""
    asked = given.batch
    scores = model.log_probs(asked.prompts, given["answers"], given["answered"], group=asked.group, share_prefix=False)
    return scores.log_prob.sum(1)


@torch.no_grad()
def baseline(run: AnswersRun, told: Told, at_once: int) -> float:
    """KTO's z: how much answers to the question before have gained under each question, at least 0. A collective."""
    others, gained = told._replace(tokens=told.tokens.roll(1, 0), mask=told.mask.roll(1, 0)), 0.0
    for part in torch.arange(len(told.prompts)).split(at_once) if told.prompts else ():
        given = recorded(others, part, tokens=1)
        gained += float(total(run.policy, given).double().sum())
        with before_training(run) as model:
            gained -= float(total(model, given).double().sum())
    every: list[tuple[float, int]] = gather_object([(gained, len(told.prompts))])
    return max(0.0, sum(g for g, _ in every) / max(1, sum(n for _, n in every)))


def recorded(told: Told, part: Tensor, *, tokens: int) -> Recorded:
    """What the loss of some questions is made of. tokens: those of all answers of the update."""
    kinds = len(told.mask) // len(told.prompts)
    rows = torch.cat([part + kind * len(told.prompts) for kind in range(kinds)])
    longest = int(told.mask[rows].sum(1).max())
    group = torch.arange(len(part)).repeat(kinds)
    asked = Asked([told.prompts[number] for number in part.tolist()], group, temperature=1.0)
    tensors = {"answers": told.tokens[rows, :longest], "answered": told.mask[rows, :longest]}
    return Recorded(asked, tensors | {"tokens": torch.tensor(tokens)})


def loss(wanted: Preference, now: Replay, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the step's loss, [], and of figures of the step."""
    log_prob, kind = now.log_prob, cast(Any, wanted.loss)
    mask, good = given["answered"].to(log_prob.device), given["good"].to(log_prob.device)
    gain, number, pairs = log_prob.sum(1), int(given["number"]), len(good)
    if "ref" in given:
        gain = gain - given["ref"].to(gain)
    if wanted.of_pairs:
        sides = (*gain.split(pairs), *mask.sum(1).split(pairs))
        output = pair_loss(kind, *sides, beta=wanted.beta, smoothing=wanted.smoothing)
        weight = torch.ones_like(output.loss)
    else:
        output = marked_loss(gain, good, float(given["baseline"]), beta=wanted.beta)
        weight = torch.where(good, wanted.desirable, wanted.undesirable)
    liked = log_prob[:pairs][good].sum() / max(1, int(given["tokens"]))
    value = (weight * output.loss).sum() / number
    if wanted.sft_weight:
        value = value - wanted.sft_weight * liked
    right = output.correct.float() + 0.5 * (output.logit == 0).float()
    figures = {"right": right.sum(), "margin": output.logit.detach().sum(), "target": liked.detach() * number}
    return {"loss": value} | {f"preference/{name}": figure / number for name, figure in figures.items()}


def mark_of(row: Row, column: str) -> bool:
    """Whether an answer is good. Raises ValueError for a column that does not say so."""
    said = row.columns.get(column)
    said = said.strip().lower() if isinstance(said, str) else said
    if isinstance(said, list | dict) or said not in MARKS:
        have = ", ".join(row.columns) or "none"
        text = f"the column {column!r} is to mark the answer true or false (trainer.preference.mark), and holds"
        raise ValueError(f"{row.name}: {text} {row.columns.get(column)!r}; columns: {have}")
    return MARKS[said]


def survey(settings: VLMSFT, questions: Questions) -> str:
    """How many rows there are of each kind, of data that are read. Raises ValueError where a row is no pair, or has no
    mark, with the number of these and the first; and where no row says anything."""
    wanted, counts, wrong = settings.preference, {True: 0, False: 0}, list[str]()
    prompt = questions[0].prompt
    assert wanted is not None
    for name, columns in questions.columns():
        row = Row(name, prompt, columns)
        try:
            texts = [target_of(row, target) for target in settings.targets]
            counts[len(set(texts)) == 2 if wanted.of_pairs else mark_of(row, wanted.mark)] += 1
        except ValueError as error:
            wrong.append(str(error))
    number, what = sum(counts.values()), "pairs" if wanted.of_pairs else "marked answers"
    if wrong:
        raise ValueError(f"{len(wrong)} of {number + len(wrong)} rows are no {what}; {wrong[0]}")
    if number and not counts[True]:
        raise ValueError(f"none of {number} rows has {'two different answers' if wanted.of_pairs else 'a good answer'}")
    if wanted.of_pairs:
        return f"{counts[True]} pairs, and {counts[False]} of equal answers, which are left out"
    return f"{counts[True]} good answers and {counts[False]} bad ones"
