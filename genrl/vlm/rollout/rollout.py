"""Answers of an iteration: questions in a seeded order, groups of drawn answers, their scores, groups left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config.vlm import VLMConfig
from genrl.mdp.noise import generator
from genrl.objectives.tokens import group_filters
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.methods.sharing import padded
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.tasks.rows import Row
from rewards.contract import Reward, Scores
from rewards.scorers.texts.completions import load_text, score_completions


@dataclass(frozen=True)
class Answers:
    """Groups of G answers each, of one process: P questions, B = P G rows, those of a question together.

    rows, prompts: P. tokens int64 [B, T], mask bool [B, T], sampler_log_prob float32 [B, T]; texts: B;
    cut bool [B]: ended by `max_new_tokens`. scores: float64 [B] by the reward's label, NaN = none.
    """

    rows: list[Row]
    prompts: list[Encoded]
    tokens: Tensor
    mask: Tensor
    sampler_log_prob: Tensor
    texts: list[str]
    cut: Tensor
    scores: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Answers to a question."""
        return len(self.texts) // max(1, len(self.rows))

    @property
    def group(self) -> Tensor:
        """int64 [B]: which question, 0 to P - 1."""
        return torch.arange(len(self.rows)).repeat_interleave(self.size)

    def chosen(self, groups: Sequence[int]) -> Answers:
        """Some of the groups, in this order."""
        size = self.size
        index = [g * size + k for g in groups for k in range(size)]
        at = torch.tensor(index, dtype=torch.int64)
        return Answers(
            [self.rows[g] for g in groups],
            [self.prompts[g] for g in groups],
            self.tokens[at],
            self.mask[at],
            self.sampler_log_prob[at],
            [self.texts[k] for k in index],
            self.cut[at],
            {label: values[at] for label, values in self.scores.items()},
        )


def joined(parts: Sequence[Answers]) -> Answers:
    """One after the other, padded to the longest answer."""
    longest = max(part.tokens.shape[1] for part in parts)

    def together(name: str) -> Tensor:
        return torch.cat([padded(getattr(part, name), longest) for part in parts])

    return Answers(
        [row for part in parts for row in part.rows],
        [prompt for part in parts for prompt in part.prompts],
        together("tokens"),
        together("mask"),
        together("sampler_log_prob"),
        [text for part in parts for text in part.texts],
        torch.cat([part.cut for part in parts]),
        {label: torch.cat([part.scores[label] for part in parts]) for label in parts[0].scores},
    )


def order(number: int, seed: int, first: int, count: int) -> list[int]:
    """Which of `number` questions come first, first + 1 ...: passes over all of them, each in an order of its own."""
    found: list[int] = []
    for place in range(first, first + count):
        lap, inside = divmod(place, number)
        if not found or inside == 0:
            shuffled = torch.randperm(number, generator=generator(seed, "questions", lap)).tolist()
        found.append(shuffled[inside])
    return found


def open_rewards(config: VLMConfig) -> dict[str, Reward]:
    """The rewards by label. Raises ValueError as `rewards.scorers.texts.completions.load_text`."""
    return {
        label: load_text(settings.name, settings.args)
        for label, settings in zip(config.reward_labels, config.rewards, strict=True)
    }


def score(
    config: VLMConfig,
    opened: Mapping[str, Reward],
    rows: Sequence[Row],
    texts: Sequence[str],
    group: Sequence[int],
    token_ids: Sequence[Sequence[int]],
) -> dict[str, Scores]:
    """Scores of texts, text k being an answer to rows[group[k]]. Raises ValueError for a column that is not there, a
    result of the wrong length, and a reward that gives no number for any text."""
    asked = [rows[number] for number in group]
    known = set.intersection(*(set(row.columns) for row in rows)) if rows else set()
    columns = {name: [row.columns[name] for row in asked] for name in sorted(known)}
    questions = [" ".join(part for part in row.prompt.parts if isinstance(part, str)) for row in asked]
    found = {}
    for (label, reward), settings in zip(opened.items(), config.rewards, strict=True):
        found[label] = score_completions(
            reward,
            prompts=questions,
            completions=list(texts),
            columns=columns,
            group=list(group),
            completion_ids=token_ids,
            conversational=settings.conversational,
            name=label,
        )
        if found[label].failures:
            failure = found[label].failures[0]
            raise ValueError(f"reward {label!r} failed on {failure.samples} answers: {failure.error}")
    return found


def draw(
    policy: Policy,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    rows: Sequence[Row],
    keys: Sequence[int | str],
    *,
    advance: Callable[[int], None] = lambda answers: None,
) -> Answers:
    """Groups of answers to these questions, with their scores; a sample's key is (*keys, its question's name)."""
    settings, size = config.generation, config.generation.group_size
    sampling = Sampling(settings.max_new_tokens, settings.temperature)
    together = max(1, (settings.batch_size or len(rows) * size) // size)
    parts = []
    for start in range(0, len(rows), together):
        some = list(rows[start : start + together])
        prompts = [policy.encode(row.prompt) for row in some]
        made = generate(policy, prompts, size, sampling, [(*keys, row.name) for row in some])
        ids = [row[kept].tolist() for row, kept in zip(made.tokens, made.mask, strict=True)]
        scores = score(config, opened, some, made.texts, made.group.tolist(), ids)
        parts.append(
            Answers(
                some,
                prompts,
                made.tokens.cpu(),
                made.mask.cpu(),
                made.log_prob.cpu(),
                made.texts,
                torch.tensor([reason == "length" for reason in made.finish]),
                {label: torch.tensor(one.values, dtype=torch.float64) for label, one in scores.items()},
            )
        )
        advance(len(made.texts))
    return joined(parts)


def totals(config: VLMConfig, scores: Mapping[str, Tensor]) -> Tensor:
    """Weighted sums, float64 [B]; rewards without a score for an answer are left out, NaN where none has one."""
    weighted = [
        (label, reward.weight)
        for label, reward in zip(config.reward_labels, config.rewards, strict=True)
        if reward.weight
    ]
    values = torch.stack([weight * scores[label] for label, weight in weighted])
    missing = values.isnan().all(0)
    return torch.where(missing, math.nan, values.nan_to_num(nan=0.0).sum(0))


def sampled_figures(config: VLMConfig, drawn: Answers, rounds: int, share: float, seconds: float) -> dict[str, float]:
    """Metrics of the answers that all processes sampled in `rounds` rounds, `share` of whose groups are trained on."""
    mine = {"tokens": drawn.mask.sum(1).double(), "cut": drawn.cut.double(), "total": totals(config, drawn.scores)}
    mine |= {f"reward/{label}": values for label, values in drawn.scores.items()}
    every = gather_object([mine])
    joint = {name: torch.cat([one[name] for one in every]) for name in mine}
    slowest = max(gather_object([seconds]))
    row = {
        "rollout/tokens_mean": float(joint["tokens"].mean()),
        "rollout/cut": float(joint["cut"].mean()),
        "rollout/rounds": float(rounds),
        "rollout/kept": share,
        "tokens_per_s": float(joint["tokens"].sum()) / slowest,
    }
    for name in ("total", *(f"reward/{label}" for label in drawn.scores)):
        label = "reward/total" if name == "total" else name
        scored = joint[name][~joint[name].isnan()]
        row[f"{label}_mean"] = float(scored.mean()) if len(scored) else float("nan")
        row[f"{label}_std"] = float(scored.std(correction=0)) if len(scored) else float("nan")
        if name != "total":
            row[f"{label}_failed"] = float(joint[name].isnan().sum())
    return row


def worth(config: VLMConfig, answers: Answers) -> list[int]:
    """Groups that the method is trained on (`VLMMethod.group_filter`)."""
    rule = config.trainer.group_filter
    if rule == "none" or not answers.rows:
        return list(range(len(answers.rows)))
    if rule == "spread":
        kept = group_filters.with_spread(totals(config, answers.scores), answers.group)
    else:
        first = answers.scores[config.reward_labels[0]]
        kept = group_filters.within(first, answers.group, low=-1.0)
    return [g for g in range(len(answers.rows)) if bool(kept[g * answers.size])]
