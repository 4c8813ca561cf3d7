"""Supervised fine-tuning on answers that are given.

    L = -1/N sum_b sum_t log pi(y[b,t] | x[b], y[b,<t])         N: tokens of all answers of the optimiser step

over the tokens of the answer alone, its end included; question, system message and pictures are read, not learnt. N is
that of all micro-batches and processes, so the split into them changes nothing but rounding. With `first_token_share`
a, as PaCo-Reward (arXiv 2512.04784) has it, the n tokens of an answer weigh n a and n (1 - a) / (n - 1) instead of 1.
With `preference` the loss is that of pairs of answers or of marked ones (`preference_loss`), a mean over them:

    h = sum_t log pi(y_t | x) - log pi_0(y_t | x)           of an answer y, pi_0: the model before training
    L = 1/P sum over pairs of f(h of the preferred, h of the other), or of marked answers of f(h, good, z)
        - sft_weight mean over tokens of the preferred answers of log pi

f by name: `objectives.preferences`. z is KTO's baseline, the mean h of the answers of a batch to others of
its questions, before the step and without gradient. P is the number of pairs of all micro-batches and processes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.preferences import marked_loss, pair_loss
from genrl.objectives.tokens import aggregate
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Results, descend, summed
from genrl.vlm.config.schema import VLMConfig, columns_of
from genrl.vlm.methods.sft.settings import VLMSFT, Preference
from genrl.vlm.methods.updates import Asked
from genrl.vlm.policies.folder import idle_pass
from genrl.vlm.policies.policy import Policy, Replay
from genrl.vlm.rollout.data import Examples, Questions, target_of, tell
from genrl.vlm.run import AnswersRun
from genrl.vlm.tasks import Row

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
    examples, wanted = tell(run.policy, rows, *settings.targets), settings.preference
    judged = None if wanted is None else Judged.of(run, settings, rows, examples)
    # Pairs of two equal answers prefer nothing: they are in the batch, and not in a pass.
    learnt = torch.arange(len(rows)) if judged is None else judged.rows
    parts = list(learnt.split(settings.rows_per_pass)) if len(learnt) else []
    own_tokens = int(examples.mask.sum()) if judged is None else judged.tokens(examples)
    every = gather_object([(len(parts), own_tokens, len(learnt))])
    # The loss is a mean over all processes' tokens or pairs, so each must know the whole number before its first pass.
    most, tokens, pairs = max(n for n, *_ in every), sum(n for _, n, _ in every), sum(n for *_, n in every)
    parts += [torch.zeros(0, dtype=torch.int64)] * (most - len(parts))  # another process has the last ones
    sums = defaultdict(float, {"loss": 0.0, "computed": 0.0, "there": float(examples.positions)})

    def prepare(part: Tensor) -> Recorded | None:
        if not len(part):
            return None
        given = recorded(examples, part, tokens=tokens)
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
        return preference_loss(settings.preference, now, given) | measured
    answered = answered.to(now.log_prob.device)
    nats = -now.log_prob
    if settings.first_token_share is not None:
        nats = nats * token_weights(answered, settings.first_token_share)
    return {"loss": aggregate(nats, answered, "token_mean_global", tokens=int(given["tokens"]))} | measured


def check(config: VLMConfig, policy: Policy) -> None:
    """Raises ValueError for data whose rows are no preferences, before anything is trained."""
    settings = cast(VLMSFT, config.trainer)
    if settings.preference is not None and config.task.name is None:
        logger.info("task.train: %s", survey(settings, Questions(config, "train")))


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
        examples = tell(run.policy, rows, *settings.targets)
        judged = Judged.of(run, settings, rows, examples)
        if len(judged.rows):
            given = judged.added(wanted, recorded(examples, judged.rows, tokens=1), judged.rows, 1)
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
    # An answer of one token has no others to share with: its weight stays 1.
    weights[:, :1] = torch.where(number > 1, number * first, 1.0)
    return weights


MARKS = {True: True, False: False, "true": True, "false": False}  # and 1 and 0, which equal these


class Judged(NamedTuple):
    """Questions with pairs, or marked answers. rows int64 [n]: those that are learnt; good bool [N]: by question,
    whether its first answer is liked; baseline: KTO's."""

    run: AnswersRun
    rows: Tensor
    good: Tensor
    baseline: float

    @classmethod
    def of(cls, run: AnswersRun, settings: VLMSFT, rows: Sequence[Row], examples: Examples) -> Self:
        """All processes call it alike."""
        wanted, number = settings.preference, len(rows)
        assert wanted is not None
        if wanted.of_pairs:
            halves = [one.split(number) if number else (one[:0], one[:0]) for one in (examples.tokens, examples.mask)]
            unlike = torch.stack([(first != second).any(1) for first, second in halves]).any(0)
            return cls(run, unlike.nonzero()[:, 0], torch.ones(number, dtype=torch.bool), 0.0)
        good = torch.tensor([mark_of(row) for row in rows], dtype=torch.bool)
        z = baseline(run, examples, settings.rows_per_pass) if wanted.loss == "kto" else 0.0
        return cls(run, torch.arange(number), good, z)

    def tokens(self, examples: Examples) -> int:
        """Number of tokens of the preferred answers that are learnt."""
        return int(examples.mask[self.rows][self.good[self.rows]].sum())

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
def baseline(run: AnswersRun, examples: Examples, at_once: int) -> float:
    """KTO's z: how much answers to the question before have gained under each question, at least 0. A collective.
    A process with one question has no other answer: it adds nothing, and z is 0 where all have one."""
    others, gained = examples._replace(tokens=examples.tokens.roll(1, 0), mask=examples.mask.roll(1, 0)), 0.0
    number = len(examples.prompts) if len(examples.prompts) > 1 else 0
    for part in torch.arange(number).split(at_once) if number else ():
        given = recorded(others, part, tokens=1)
        gained += float(total(run.policy, given).double().sum())
        with before_training(run) as model:
            gained -= float(total(model, given).double().sum())
    every: list[tuple[float, int]] = gather_object([(gained, number)])
    return max(0.0, sum(g for g, _ in every) / max(1, sum(n for _, n in every)))


def recorded(examples: Examples, part: Tensor, *, tokens: int) -> Recorded:
    """What the loss of some questions is made of. tokens: those of all answers of the update."""
    kinds = len(examples.mask) // len(examples.prompts)
    rows = torch.cat([part + kind * len(examples.prompts) for kind in range(kinds)])
    # Cut to the longest of these rows: padding up to that of the batch would be computed for nothing.
    longest = int(examples.mask[rows].sum(1).max())
    group = torch.arange(len(part)).repeat(kinds)
    asked = Asked([examples.prompts[number] for number in part.tolist()], group, temperature=1.0)
    tensors = {"answers": examples.tokens[rows, :longest], "answered": examples.mask[rows, :longest]}
    return Recorded(asked, tensors | {"tokens": torch.tensor(tokens)})


def preference_loss(wanted: Preference, now: Replay, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the step's loss, [], and of figures of the step."""
    log_prob, kind = now.log_prob, cast(Any, wanted.loss)
    mask, good = given["answered"].to(log_prob.device), given["good"].to(log_prob.device)
    gain, number, pairs = log_prob.sum(1), int(given["number"]), len(good)
    # orpo alone compares with no model before training.
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
    # A tie counts half, so that a model that prefers nothing is at 0.5 and not at 0.
    right = output.correct.float() + 0.5 * (output.logit == 0).float()
    figures = {"right": right.sum(), "margin": output.logit.detach().sum(), "target": liked.detach() * number}
    return {"loss": value} | {f"preference/{name}": figure / number for name, figure in figures.items()}


def mark_of(row: Row) -> bool:
    """Whether an answer is good, by its column `label` as in TRL. Raises ValueError where that does not say so."""
    said = row.columns.get("label")
    said = said.strip().lower() if isinstance(said, str) else said
    if isinstance(said, list | dict) or said not in MARKS:
        have = ", ".join(row.columns) or "none"
        text = "the column 'label' is to mark the answer true or false, and holds"
        raise ValueError(f"{row.name}: {text} {row.columns.get('label')!r}; columns: {have}")
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
            counts[len(set(texts)) == 2 if wanted.of_pairs else mark_of(row)] += 1
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
