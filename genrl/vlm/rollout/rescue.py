"""Help with questions that no answer of a group is right to: one right answer takes the place of the first.

    rescue: {hints: [hint, plan, solution]}           # Scaf-GRPO (arXiv 2510.19807): the least hint that helps
    rescue: {hints: [example], plain: true}           # ICPO (arXiv 2510.26519): trained under the question alone
    rescue: {demonstration: solution}                 # LUFFY (arXiv 2504.14945): an answer that is given

All else of the group stays as it was, so that its advantages are those of one right answer among wrong ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import Rescue
from genrl.vlm.methods.updates import padded
from genrl.vlm.policies.contract import Sampled
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.rollout.augment import question_of, with_text
from genrl.vlm.rollout.rollout import Answers, Part, check_failed, draw, failures_of, is_right, joined, scored
from genrl.vlm.tasks import Row
from genrl_rewards.contract import Reward
from genrl_rewards.failures import Failure

logger = logging.getLogger(__name__)


class Helped:
    """Of one iteration: what help was needed, and what it brought."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[Mapping[str, tuple[Failure, ...]]] = []

    def rescued(
        self, config: VLMConfig, settings: Rescue, answers: Answers, ask: Callable[[Sequence[Row], int], Answers]
    ) -> Answers:
        """The answers, of which the first of some groups are right ones that help brought.

        ask: gives one answer to each of these questions, with the help of this level, 0 first. A group in which an
        answer has no score is left alone: it may be right.
        """
        size, levels = answers.size, 1 if settings.demonstration else len(settings.hints)
        right, unknown = right_of(config, answers)
        failed = (~(right | unknown)).view(len(answers.rows), -1).all(1).nonzero()[:, 0].tolist()
        self.counts.update(groups=len(answers.rows), failed=len(failed))
        for level in range(levels):
            if not failed:
                break
            attempts = ask([answers.rows[k] for k in failed], level)
            self.failures.append(attempts.failures)
            helped = right_of(config, attempts)[0].tolist()
            places = {k * size: number for number, k in enumerate(failed) if helped[number]}
            self.counts.update(attempts=len(failed), rescued=len(places), levels=(level + 1) * len(places))
            sampled = settings.demonstration is None and not settings.plain
            answers = placed(answers, places, attempts, sampled=sampled)
            failed = [k for k in failed if k * size not in places]
        return answers

    def figures(self, config: VLMConfig) -> dict[str, float]:
        """Metrics of all processes. Raises RewardFailed as `check_failed`."""
        counts: Counter[str] = sum(gather_object([self.counts]), Counter())
        if counts["attempts"]:
            check_failed(config, failures_of(gather_object([failures_of(self.failures)])), counts["attempts"])
        row = {"rescue/failed": counts["failed"] / counts["groups"]} if counts["groups"] else {}
        if counts["failed"]:
            row["rescue/rescued"] = counts["rescued"] / counts["failed"]
        if counts["rescued"]:
            row["rescue/level"] = counts["levels"] / counts["rescued"]
        return row


def right_of(config: VLMConfig, answers: Answers) -> tuple[Tensor, Tensor]:
    """Which answers are right by the first reward, and which have no score, bool [B]."""
    first = answers.scores[config.reward_labels[0]]
    return is_right(config, first), first.isnan()


def placed(answers: Answers, places: Mapping[int, int], attempts: Answers, *, sampled: bool) -> Answers:
    """The answers with some of the attempts in these places (row -> attempt). sampled: the model sampled them under the
    attempt's question, and is trained under it; else under that of the row."""
    rows, taken = (torch.tensor([*numbers], dtype=torch.int64) for numbers in (places, places.values()))
    longest = max(answers.tokens.shape[1], attempts.tokens.shape[1])

    def put(name: str) -> Tensor:
        values, others = (padded(getattr(part, name), longest) for part in (answers, attempts))
        return values.index_copy(0, rows, others[taken])

    return replace(
        answers,
        tokens=put("tokens"),
        mask=put("mask"),
        sampler_log_prob=put("sampler_log_prob"),
        texts=[attempts.texts[places[k]] if k in places else text for k, text in enumerate(answers.texts)],
        cut=answers.cut.index_copy(0, rows, attempts.cut[taken]),
        # what only the question's other answers have, as that of the most probable one, stays
        scores={
            label: values.index_copy(0, rows, attempts.scores[label][taken]) if label in attempts.scores else values
            for label, values in answers.scores.items()
        },
        rescued={**answers.rescued, **{k: attempts.prompts[n] if sampled else None for k, n in places.items()}},
    )


def one_each(
    config: VLMConfig,
    settings: Rescue,
    policy: Policy,
    opened: Mapping[str, Reward],
    since: tuple[int, int],
    rows: Sequence[Row],
    level: int,
) -> Answers:
    """One answer to each of these questions, with the help of this level. since: iteration and place in the data, part
    of the samples' keys."""
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"group_size": 1})})
    if settings.demonstration is not None:
        return given(config, settings, policy, opened, rows)
    return draw(policy, config, opened, hinted(settings, rows, level), (config.seed, "rescue", level, *since))


def hinted(settings: Rescue, rows: Sequence[Row], level: int) -> list[Row]:
    """The questions with the hint of this level. Raises ValueError naming the one that lacks it."""
    column = settings.hints[level]
    for row in rows:
        if not isinstance(row.columns.get(column), str):
            raise ValueError(f"{row.name}: rescue.hints reads the text in {column!r}, which is not there")
    return [with_text(row, settings.prompt.format(question=question_of(row), hint=row.columns[column])) for row in rows]


def given(
    config: VLMConfig, settings: Rescue, policy: Policy, opened: Mapping[str, Reward], rows: Sequence[Row]
) -> Answers:
    """The answers that the data gives, scored as the model's own. One that is not right is named, and not taken."""
    column, parts = settings.demonstration or "", []
    for row in rows:
        text = row.columns.get(column)
        if not isinstance(text, str):
            raise ValueError(f"{row.name}: rescue.demonstration reads the text in {column!r}, which is not there")
        tokens = answer_ids(row.prompt, text, policy.processor, policy.stop_ids)[None]
        one = Sampled(tokens, torch.ones_like(tokens).bool(), None, torch.zeros(1, dtype=torch.bool), [text], {})
        answer = scored(config, opened, Part([row], [policy.encode(row.prompt)], one))
        if not bool(right_of(config, answer)[0].all()):
            logger.warning("%s: the first reward does not call the %s right; it is not taken", row.name, column)
        parts.append(answer)
    return joined(parts)
