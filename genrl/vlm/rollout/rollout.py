"""Answers of an iteration: questions in a seeded order, groups of drawn answers, their scores, groups left out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

import genrl_rewards
from genrl.mdp.noise import generator
from genrl.objectives import groups
from genrl.objectives.credit import max_variance
from genrl.objectives.token_regularisers import over_views
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.methods.updates import padded
from genrl.vlm.policies.contract import Sampled, SequencePolicy
from genrl.vlm.policies.pictures import blank
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import Prompt, Unreadable, named_error
from genrl.vlm.tasks import Row
from genrl_rewards.contract import Reward, Scores
from genrl_rewards.failures import Failure
from genrl_rewards.scorers.texts.completions import load_text, score_completions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answers:
    """Groups of G answers each, of one process: P questions, B = P G rows, those of a question together.

    rows, prompts: P. tokens int64 [B, T], mask bool [B, T], sampler_log_prob float32 [B, T]; texts: B;
    cut bool [B]: ended by `max_new_tokens`. scores: float64 [B] by the reward's label, NaN = none. failures: by the
    label of a reward that raised. rescued: rows that help brought, with the prompt that they are trained under, None =
    the question alone, under which the model did not sample them.
    """

    rows: list[Row]
    prompts: list[Encoded]
    tokens: Tensor
    mask: Tensor
    sampler_log_prob: Tensor
    texts: list[str]
    cut: Tensor
    scores: dict[str, Tensor]
    failures: dict[str, tuple[Failure, ...]] = field(default_factory=dict)
    rescued: Mapping[int, Encoded | None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Answers to a question."""
        return len(self.texts) // max(1, len(self.rows))

    @property
    def group(self) -> Tensor:
        """int64 [B]: which question, 0 to P - 1."""
        return torch.arange(len(self.rows)).repeat_interleave(self.size)

    @property
    def asked(self) -> tuple[list[Encoded], Tensor]:
        """Prompts, and which of them each answer [B] is trained under: its question, or that with a hint."""
        prompts, of_row = list(self.prompts), self.group
        for row, prompt in self.rescued.items():
            if prompt is not None:
                of_row[row] = len(prompts)
                prompts.append(prompt)
        return prompts, of_row

    @property
    def unsampled(self) -> Tensor:
        """bool [B]: answers that the model did not sample under the prompt that they are trained under."""
        rows = [row for row, prompt in self.rescued.items() if prompt is None]
        return torch.zeros(len(self.texts), dtype=torch.bool).index_fill(0, torch.tensor(rows, dtype=torch.int64), True)

    def chosen(self, groups: Sequence[int]) -> Answers:
        """Some of the groups, in this order."""
        size = self.size
        return self._of(groups, [g * size + k for g in groups for k in range(size)])

    def downsampled(self, totals: Tensor, keep: int) -> Answers:
        """Keep of each group the `keep` answers whose total rewards [B] have the largest variance (PODS)."""
        selected = max_variance(totals.view(len(self.rows), -1), keep) if self.rows else totals.bool()
        return self._of(range(len(self.rows)), selected.flatten().nonzero()[:, 0].tolist())

    def _of(self, groups: Sequence[int], index: Sequence[int]) -> Answers:
        """Answers of these groups, those at `index`."""
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
            self.failures,
            {place: self.rescued[row] for place, row in enumerate(index) if row in self.rescued},
        )


def joined(parts: Sequence[Answers]) -> Answers:
    """One after the other, padded to the longest answer."""
    longest = max(part.tokens.shape[1] for part in parts)

    def together(name: str) -> Tensor:
        return torch.cat([padded(getattr(part, name), longest) for part in parts])

    firsts = accumulate((len(part.texts) for part in parts), initial=0)
    return Answers(
        [row for part in parts for row in part.rows],
        [prompt for part in parts for prompt in part.prompts],
        together("tokens"),
        together("mask"),
        together("sampler_log_prob"),
        [text for part in parts for text in part.texts],
        torch.cat([part.cut for part in parts]),
        {label: torch.cat([part.scores[label] for part in parts]) for label in parts[0].scores},
        failures_of([part.failures for part in parts]),
        {first + k: prompt for first, part in zip(firsts, parts, strict=False) for k, prompt in part.rescued.items()},
    )


def failures_of(parts: Sequence[Mapping[str, tuple[Failure, ...]]]) -> dict[str, tuple[Failure, ...]]:
    """Failures of several calls, by the reward's label."""
    labels = {label: None for part in parts for label in part}
    return {label: tuple(failure for part in parts for failure in part.get(label, ())) for label in labels}


def check_failed(config: VLMConfig, failures: Mapping[str, Sequence[Failure]], answers: int) -> None:
    """Raises RewardFailed where a reward raised for more of the answers than its `max_failed`, with the first row."""
    for label, settings in zip(config.reward_labels, config.rewards, strict=True):
        failed = failures.get(label, ())
        first = genrl_rewards.first_failure(failed)
        number = sum(failure.samples for failure in failed)
        genrl_rewards.check_failures(label, number, answers, first, limit=settings.max_failed)


def order(number: int, seed: int, first: int, count: int) -> list[int]:
    """Which of `number` questions come first, first + 1 ...: passes over all of them, each in an order of its own."""
    numbers: list[int] = []
    for place in range(first, first + count):
        lap, inside = divmod(place, number)
        # One order a lap, whichever part of it is asked for: a resumed run asks for the rest.
        if not numbers or inside == 0:
            shuffled = torch.randperm(number, generator=generator(seed, "questions", lap)).tolist()
        numbers.append(shuffled[inside])
    return numbers


def open_rewards(config: VLMConfig) -> dict[str, Reward]:
    """The rewards by label. Raises ValueError as `genrl_rewards.scorers.texts.completions.load_text`."""
    return {
        label: load_text(settings.name, settings.args)
        for label, settings in zip(config.reward_labels, config.rewards, strict=True)
    }


def score(
    config: VLMConfig, opened: Mapping[str, Reward], rows: Sequence[Row], sampled: Sampled, group: Sequence[int]
) -> dict[str, Scores]:
    """Scores of what was sampled, number k being an answer to rows[group[k]]: by rewards of pictures where there are
    `images`, else of texts; failures name the question. Raises ValueError for a column that is not there, and a result
    of the wrong length."""
    questions = [rows[number] for number in group]
    # A reward is given whole columns, so what some of the rows lack it cannot have.
    shared_columns = set.intersection(*(set(row.columns) for row in rows)) if rows else set()
    columns = {name: [row.columns[name] for row in questions] for name in sorted(shared_columns)}
    prompts, images = [text_of(row) for row in questions], sampled.made.get("images")
    ids = None
    if images is None and sampled.mask.shape == sampled.tokens.shape:  # else it is of estimates
        ids = [row[row_mask].tolist() for row, row_mask in zip(sampled.tokens, sampled.mask, strict=True)]
    scores: dict[str, Scores] = {}
    for (label, reward), settings in zip(opened.items(), config.rewards, strict=True):
        if images is None:
            scores[label] = score_completions(
                reward,
                prompts=prompts,
                completions=sampled.texts,
                columns=columns | {name: list(values) for name, values in sampled.made.items()},
                group=list(group),
                completion_ids=ids,
                conversational=settings.conversational,
                name=label,
            )
        elif images.dim() == 6:  # of each step six views
            coarse, fine = (
                _of_views(reward, images[:, step], prompts, columns, settings.views, label) for step in (0, -1)
            )
            scores |= {label: fine, f"{label}/coarse": coarse}
        else:
            scores[label] = genrl_rewards.score(
                reward, images=images, prompts=prompts, columns=columns, group=list(group), name=label
            )
        scores[label] = replace(
            scores[label], failures=tuple(_named(failure, questions) for failure in scores[label].failures)
        )
    return scores


def _named(failure: Failure, asked: Sequence[Row]) -> Failure:
    """A failure with the name of the first question whose answer was scored."""
    name = asked[failure.rows[0] if failure.rows else 0].name
    return failure._replace(error=f"{name}: {failure.error}", traceback=f"{name}: {failure.traceback}")


def _of_views(
    reward: Reward, images: Tensor, prompts: Sequence[str], columns: Mapping[str, list[Any]], rule: Any, label: str
) -> Scores:
    """One score of the six views [B, 6, 3, H, W] of each shape. A view without a score makes the shape's NaN."""

    def each(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(images.shape[1])]

    scored = genrl_rewards.score(
        reward,
        images=images.flatten(0, 1),
        prompts=each(prompts),
        columns={name: each(values) for name, values in columns.items()},
        group=each(range(len(images))),
        name=label,
    )
    scores = torch.tensor(scored.values, dtype=torch.float64).view(images.shape[:2])
    return Scores(over_views(scores, rule).tolist(), failures=scored.failures)


def text_of(row: Row) -> str:
    """The words of a prompt."""
    return " ".join(part for part in row.prompt.parts if isinstance(part, str))


def sample(
    policy: Any,
    config: VLMConfig,
    prompts: Sequence[Encoded],
    n: int,
    temperature: float,
    keys: Sequence[Sequence[int | str]],
) -> Sampled:
    """n answers to each prompt: by the policy's own `sample`, or texts of a vision-language model; 0 is greedy."""
    if isinstance(policy, SequencePolicy):
        return policy.sample(prompts, n, temperature, keys)
    completions = generate(policy, prompts, n, Sampling(config.generation.max_new_tokens, temperature), keys)
    # Answers of a whole iteration wait on the CPU: the device has its room for the next ones.
    cut = torch.tensor([reason == "length" for reason in completions.finish])
    return Sampled(
        completions.tokens.cpu(), completions.mask.cpu(), completions.log_prob.cpu(), cut, completions.texts, {}
    )


def greedy_label(label: str) -> str:
    """Under which `Answers.scores` has a reward of the most probable answer to a row's question."""
    return f"{label}/greedy"


class Part(NamedTuple):
    """Some groups of answers, as drawn; greedy: the most probable one to each question, where the method reads it.
    unread: why the pictures of some rows could not be opened; the answers to these were drawn without them."""

    rows: list[Row]
    prompts: list[Encoded]
    made: Sampled
    greedy: Sampled | None = None
    unread: Mapping[int, str] = {}


def sample_parts(policy: Policy, config: VLMConfig, rows: Sequence[Row], keys: Sequence[int | str]) -> Iterator[Part]:
    """Groups of answers to these questions, so many at a time; a sample's key is (*keys, its question's name). One that
    cannot be prepared (a picture that cannot be opened, a text that is too long, ...) is asked about black pictures or
    not at all, and the answers to it will have no score."""
    settings, size = config.generation, config.generation.group_size
    # Whole groups: the prefix of a question is computed once for all of its answers.
    together = max(1, (settings.batch_size or len(rows) * size) // size)
    for start in range(0, len(rows), together):
        some, prompts, unread = list(rows[start : start + together]), list[Encoded](), dict[int, str]()
        for k, row in enumerate(some):
            try:
                if row.prompt.broken:  # which policies over other tokens do not look at
                    raise Unreadable(row.prompt.broken)
                prompts.append(_encoded(policy, config, row.prompt))
            # Memory that ran out says nothing of the row.
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 processors and tokenizers raise anything for data from outside
                unread[k] = named_error(row.name, error)
                logger.warning("%s; its answers have no score", unread[k])
                some[k], encoded = _in_place_of(policy, config, row, error)
                prompts.append(encoded)
        columns = next((row.columns for k, row in enumerate(some) if k not in unread), {})
        for k in unread:  # a row that is broken may lack columns, by which the others are scored
            some[k] = replace(some[k], columns={**columns, **some[k].columns})
        # By name, not by place: the answer to a question is the same whichever questions are drawn beside it.
        named = [(*keys, row.name) for row in some]
        sampled = sample(policy, config, prompts, size, settings.temperature, named)
        greedy = sample(policy, config, prompts, 1, 0.0, named) if "greedy" in config.trainer.reads else None
        yield Part(some, prompts, sampled, greedy, unread)


def _encoded(policy: Policy, config: VLMConfig, prompt: Prompt) -> Encoded:
    """A prompt that the model has room for."""
    encoded = policy.encode(prompt)
    if isinstance(policy, Policy):  # others' answers are as long as they are
        policy.check_room([encoded], config.generation.max_new_tokens)
    return encoded


def _in_place_of(policy: Policy, config: VLMConfig, row: Row, error: Exception) -> tuple[Row, Encoded]:
    """A question about black pictures, or a mark alone where that cannot be asked either."""
    # Something has to be asked, so that batches and processes keep their shapes; the answers get no score.
    for prompt in (blank(row.prompt), Prompt(("?",), where=row.name)):
        try:
            return replace(row, prompt=prompt), _encoded(policy, config, prompt)
        except ValueError:
            continue
    raise error


def scored(config: VLMConfig, opened: Mapping[str, Reward], part: Part) -> Answers:
    """Answers with their scores. Where the sampler has no log-probabilities, theirs are NaN. An answer for which a
    reward raised has no score by any: a part of the sum would say nothing about it. Nor have the answers to a question
    whose most probable answer, with which they are compared, has no score by a reward that one of them has a score by,
    nor those to a question whose pictures could not be opened, which counts as a failure of every reward."""
    rows, prompts, sampled, greedy, unread = part
    size = config.generation.group_size
    of_row = [number for number in range(len(rows)) for _ in range(size)]
    if len(unread) == len(rows):  # there may be no columns to score by
        labels = [*opened, *(greedy_label(label) for label in opened if greedy is not None)]
        scores = {label: torch.full((len(of_row),), math.nan, dtype=torch.float64) for label in labels}
        failures: dict[str, tuple[Failure, ...]] = {}
    else:
        scores, failures = _all_or_none(score(config, opened, rows, sampled, of_row))
    if greedy is not None and len(unread) < len(rows):
        compared, failed = _all_or_none(score(config, opened, rows, greedy, range(len(rows))))
        for label in opened:
            scores[greedy_label(label)] = compared[label][of_row]
            failures[label] = (*failures.get(label, ()), *failed.get(label, ()))
        failures = {label: failed_rows for label, failed_rows in failures.items() if failed_rows}
        lacking = [compared[label].isnan() & ~scores[label].view(-1, size).isnan().all(1) for label in opened]
        unknown = torch.stack(lacking).any(0)[of_row]
        for label in opened:
            scores[label][unknown] = math.nan
    for k, error in unread.items():
        places = tuple(range(k * size, (k + 1) * size))
        for values in scores.values():
            values[list(places)] = math.nan
        for label in opened:
            others = tuple(failure for failure in failures.get(label, ()) if not set(failure.rows) & set(places))
            failures[label] = (*others, Failure(size, error, error, rows=places))
    return Answers(
        rows,
        prompts,
        sampled.tokens,
        sampled.mask,
        torch.full(sampled.mask.shape, torch.nan) if sampled.log_prob is None else sampled.log_prob,
        sampled.texts,
        sampled.cut,
        scores,
        failures,
    )


def draw(
    policy: Policy,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    rows: Sequence[Row],
    keys: Sequence[int | str],
    *,
    advance: Callable[[int], None] = lambda answers: None,
) -> Answers:
    """`sample_parts` and `scored`, one part after the other. advance: is told how many answers are there."""
    parts = []
    for part in sample_parts(policy, config, rows, keys):
        parts.append(scored(config, opened, part))
        advance(len(part.made.texts))
    return joined(parts)


def is_right(config: VLMConfig, first: Tensor) -> Tensor:
    """Which answers are right by the scores [B] of the first reward, bool; none without a score."""
    # 1e-9: rewards are sums of floats, and NaN compares as false, which is meant.
    return first >= config.evaluation.right_at - 1e-9


def totals(config: VLMConfig, scores: Mapping[str, Tensor]) -> Tensor:
    """Weighted sums, float64 [B]; rewards without a score for an answer are left out, NaN where none has one."""
    weighted = [
        (label, reward.weight)
        for label, reward in zip(config.reward_labels, config.rewards, strict=True)
        # A reward of weight 0 is watched only: that it failed for an answer must not take the answer out.
        if reward.weight
    ]
    if not weighted:  # of methods that learn without rewards
        return torch.zeros_like(next(iter(scores.values())))
    values = torch.stack([weight * scores[label] for label, weight in weighted])
    missing = values.isnan().all(0)
    return torch.where(missing, math.nan, values.nan_to_num(nan=0.0).sum(0))


def _all_or_none(results: Mapping[str, Scores]) -> tuple[dict[str, Tensor], dict[str, tuple[Failure, ...]]]:
    """Scores by reward, float64 [B], NaN in all of them where one raised; and the failures of those that did."""
    scores = {label: torch.tensor(result.values, dtype=torch.float64) for label, result in results.items()}
    failures = {label: result.failures for label, result in results.items() if result.failures}
    for result in (result for failed in failures.values() for result in failed):
        for values in scores.values():
            values[list(result.rows or range(len(values)))] = math.nan
    return scores, failures


def sampled_figures(config: VLMConfig, answers: Answers, rounds: int, share: float, seconds: float) -> dict[str, float]:
    """Metrics of the answers that all processes sampled in `rounds` rounds, `share` of whose groups are trained on.
    Raises RewardFailed as `check_failed`."""
    local = {"tokens": answers.mask.sum(1).double(), "cut": answers.cut.double()}
    local |= {"total": totals(config, answers.scores)}
    local |= {f"reward/{label}": values for label, values in answers.scores.items()}
    every = gather_object([local])
    check_failed(config, failures_of(gather_object([answers.failures])), sum(len(part["total"]) for part in every))
    joint = {name: torch.cat([part[name] for part in every]) for name in local}
    # All wait for the slowest.
    slowest = max(gather_object([seconds]))
    row = {
        "rollout/tokens_mean": float(joint["tokens"].mean()),
        "rollout/cut": float(joint["cut"].mean()),
        "rollout/rounds": float(rounds),
        "rollout/kept": share,
        "tokens_per_s": float(joint["tokens"].sum()) / slowest,
    }
    for name in ("total", *(f"reward/{label}" for label in answers.scores)):
        label = "reward/total" if name == "total" else name
        scored = joint[name][~joint[name].isnan()]
        row[f"{label}_mean"] = float(scored.mean()) if len(scored) else float("nan")
        row[f"{label}_std"] = float(scored.std(correction=0)) if len(scored) else float("nan")
        if name != "total":
            row[f"{label}_failed"] = float(joint[name].isnan().sum())
    return row


def trained_on(config: VLMConfig, answers: Answers) -> Answers:
    """Groups that the method is trained on, or `economy.keep` of each."""
    chosen, keep = answers.chosen(worth(config, answers)), config.economy.keep
    return chosen if keep is None else chosen.downsampled(totals(config, chosen.scores), keep)


def worth(config: VLMConfig, answers: Answers) -> list[int]:
    """Groups that the method is trained on (`VLMMethod.group_filter`)."""
    rule = config.trainer.group_filter.rule
    if rule == "none" or not answers.rows:
        return list(range(len(answers.rows)))
    if rule == "spread":
        worthwhile = groups.with_spread(totals(config, answers.scores), answers.group)
    else:
        first = answers.scores[config.reward_labels[0]]
        # NGRPO keeps groups that are all wrong: its virtual right answer gives them an advantage.
        worthwhile = groups.within(first, answers.group, low=-1.0)
    return [g for g in range(len(answers.rows)) if bool(worthwhile[g * answers.size])]
