"""Rewards for written answers that a rule can check: exact, numeric, multiple choice, boxes, format, votes.

All follow the contract of `genrl_rewards.contract`: `completions` is a list of N generated texts, `answer` the column
of the same name, everything with a default is an option. Scores are in [0, 1]; None if the *data* has nothing to
compare with (`expected.is_nothing`), never for a wrong answer. What is expected is read by `expected` alone. The answer
is the text in the last `<answer> ... </answer>`; with `tag: ""` it is the whole completion. Text from a model is
parsed, never evaluated.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rapidfuzz.distance import LCSseq, Levenshtein

from genrl_rewards.scorers.texts.expected import (
    coordinates_in,
    corners_of,
    forms_of,
    integers_of,
    letters_in,
    letters_of,
    number_in,
    number_of,
    numbers_in,
    plain,
    reads,
    text_of,
    texts_of,
    truths,
)

T = TypeVar("T")


def answer_in(completion: str, tag: str = "answer") -> str | None:
    """The text of the last complete `<tag> ... </tag>`, stripped; None if there is none. tag "": all of it."""
    if not tag:
        return completion.strip()
    matches = re.findall(
        rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", completion, re.DOTALL
    )
    return matches[-1].strip() if matches else None


def _rows(completions: Iterable[str], expected: Iterable[T], tag: str) -> Iterator[tuple[str, T]]:
    """Each answer ("" if it is missing) with what is expected."""
    return ((answer_in(text, tag) or "", truth) for text, truth in zip(completions, expected, strict=True))


@reads("text", forms_of)
def exact(
    completions: list[str], answer: list[Any], tag: str = "answer", ignore_case: bool = True
) -> list[float | None]:
    """1 if the answer is the expected text, apart from white space, forms of Unicode and (with ignore_case) case."""

    def folded(text: str) -> str:
        joined = " ".join(plain(text).split())
        return joined.casefold() if ignore_case else joined

    def score(completion: str, forms: Sequence[str]) -> float:
        written = answer_in(completion, tag)
        return float(written is not None and folded(written) in map(folded, forms))

    rows = zip(completions, truths(answer, forms_of, "exact"), strict=True)
    return [score(completion, forms) if forms else None for completion, forms in rows]


@reads("number", number_of)
def numeric(
    completions: list[str], answer: list[Any], tag: str = "answer", decimals: int | None = 2, relative: bool = False
) -> list[float | None]:
    """1 if the answer is one number that equals the expected one to `decimals` digits (null: within 1e-9).

    They are digits behind the point, of an expected number below 0.1 significant ones: .001 is not .004, nor 0.
    relative: max(0, 1 - |number - expected| / |expected|) instead, for regression: smaller errors score more.
    Raises ValueError if an expected answer is not a number.
    """

    def tolerance(truth: float) -> float:
        if decimals is None or not truth:
            return 0.0
        return 0.5 * 10.0 ** (min(0, math.floor(math.log10(abs(truth))) + 1) - decimals)

    scores: list[float | None] = []
    for written, truth in _rows(completions, truths(answer, number_of, "numeric"), tag):
        value = number_in(written)
        if truth is None or value is None:
            scores.append(None if truth is None else 0.0)
        elif relative:
            scores.append(max(0.0, 1.0 - abs(value - truth) / max(abs(truth), 1e-9)))
        else:
            # A little more than half of the last digit, which floats do not hold exactly.
            scores.append(float(abs(value - truth) <= tolerance(truth) + min(1e-9, abs(truth) * 1e-6 or 1e-9)))
    return scores


@reads("text", forms_of)
def relaxed(completions: list[str], answer: list[Any], tag: str = "answer", share: float = 0.05) -> list[float | None]:
    """1 if the answer is a number within `share` of the expected one, or else the same text: relaxed accuracy.

    ChartQA (arXiv 2203.10244, 5.1: 5 %), in Pix2Struct's version: 50% is 0.5, and 0 is compared as a text. Units,
    `$` and thousands' commas are read past, which Pix2Struct does not.
    """

    def number(text: str) -> float | None:
        value = number_in(text)
        return value / 100 if value is not None and re.search(r"(?:%|\bper ?cent)\s*\.?$", plain(text)) else value

    scores: list[float | None] = []
    for written, forms in _rows(completions, truths(answer, forms_of, "relaxed"), tag):
        value, target = number(written), number(forms[0].strip()) if forms else None
        if target and value is not None:
            right = abs(value - target) <= share * abs(target) + 1e-12
        else:
            right = plain(written).casefold() in (form.strip().casefold() for form in forms)
        scores.append(float(right) if forms else None)
    return scores


@reads("text", texts_of)
def anls(completions: list[str], answer: list[Any], tag: str = "answer") -> list[float | None]:
    """The greatest 1 - NL over the expected texts, 0 where NL >= 0.5; NL: edits over the longer length, without case.

    The score of a question in ANLS (Biten et al., ICCV 2019, arXiv 1905.13648), the measure of DocVQA.
    """
    scores: list[float | None] = []
    for written, texts in _rows(completions, truths(answer, texts_of, "anls"), tag):
        answer_text = plain(written).casefold()
        parts = [Levenshtein.normalized_distance(answer_text, text.strip().casefold()) for text in texts]
        scores.append(max(1 - part if part < 0.5 else 0.0 for part in parts) if parts else None)
    return scores


@reads("letters", letters_of)
def choice(completions: list[str], answer: list[Any], tag: str = "answer", partial: bool = False) -> list[float | None]:
    """1 if the letters of the answer are the expected ones: `B`, or `A, C` for several right ones.

    partial: chosen / right if nothing wrong was chosen (TW-GRPO's soft accuracy for multiple choice), otherwise 0.
    Raises ValueError if an expected answer names no letter.
    """
    scores: list[float | None] = []
    for written, right in _rows(completions, truths(answer, letters_of, "choice"), tag):
        chosen = letters_in(written)
        soft = len(chosen) / max(len(right), 1) if chosen <= right else 0.0
        scores.append((soft if partial else float(chosen == right)) if right else None)
    return scores


def iou_of(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes (left, top, right, bottom) or two intervals (start, end), in [0, 1].

    Corners in the wrong order make an empty box, which has 0 with anything.
    """
    half = len(first) // 2
    sides = [(first[k + half] - first[k], second[k + half] - second[k]) for k in range(half)]
    overlap = [min(first[k + half], second[k + half]) - max(first[k], second[k]) for k in range(half)]
    if min(min(pair) for pair in sides) <= 0 or min(overlap) <= 0:
        return 0.0
    common = math.prod(overlap)
    return common / (math.prod(side for side, _ in sides) + math.prod(side for _, side in sides) - common)


@reads("box", corners_of, "box")
def iou(
    completions: list[str], box: list[Any], tag: str = "answer", threshold: float | None = None
) -> list[float | None]:
    """Overlap of the written box `[left, top, right, bottom]` with the expected one; 0 if no box can be read.

    Read is the last mapping or bracketed list of 4 numbers, else a text with 4 numbers. If the column `box` has 2
    numbers, it is an interval of time. threshold: 1 from this overlap on, otherwise 0. Both boxes are in the
    coordinates of the same picture: that of the prompt as the model sees it. `box` may be a list, a mapping or JSON.
    Raises ValueError if an expected box has another number of coordinates, or a width and a height.
    """
    scores: list[float | None] = []
    for written, truth in _rows(completions, truths(box, corners_of, "iou"), tag):
        numbers = coordinates_in(written, len(truth)) if truth else []
        overlap = iou_of(numbers, truth) if numbers else 0.0
        scores.append((overlap if threshold is None else float(overlap >= threshold)) if truth else None)
    return scores


@reads("box", lambda value: corners_of(value, (4,)), "box")
def point_in_box(completions: list[str], box: list[Any], tag: str = "answer") -> list[float | None]:
    """1 if the written point `x, y` is inside the expected box `[left, top, right, bottom]` or on its border."""
    scores: list[float | None] = []
    boxes = truths(box, lambda value: corners_of(value, (4,)), "point_in_box")
    for written, truth in _rows(completions, boxes, tag):
        point = coordinates_in(written, 2)
        left, top, right, bottom = truth or (0, 0, 0, 0)
        inside = len(point) == 2 and left <= point[0] <= right and top <= point[1] <= bottom
        scores.append(float(inside) if truth else None)
    return scores


@reads("whole numbers", integers_of)
def ordering(completions: list[str], answer: list[Any], tag: str = "answer", columns: int = 0) -> list[float | None]:
    """The share of positions of a list of integers, such as `3, 1, 2`, that are right: the full jigsaw of Jigsaw-R1.

    columns: for pieces in rows of this many columns, the share of neighbours (to the right and below) that
    are also neighbours in the true order, instead. 0 for a list of another length, or one that is not a permutation.
    """
    scores: list[float | None] = []
    for written, truth in _rows(completions, truths(answer, integers_of, "ordering"), tag):
        numbers = numbers_in(written)
        order = [int(number) for number in numbers]
        if not truth or order != numbers or sorted(order) != sorted(truth):
            scores.append(0.0 if truth else None)
        elif columns:
            neighbours = _neighbours(truth, columns)
            scores.append(len(neighbours & _neighbours(order, columns)) / max(len(neighbours), 1))
        else:
            scores.append(sum(a == b for a, b in zip(order, truth, strict=True)) / len(truth))
    return scores


def _neighbours(pieces: Sequence[int], columns: int) -> set[tuple[int, int, str]]:
    right = {(a, pieces[k + 1], "right") for k, a in enumerate(pieces[:-1]) if (k + 1) % columns}
    return right | {(a, pieces[k + columns], "below") for k, a in enumerate(pieces[:-columns])}


@reads("whole numbers", integers_of)
def indices(completions: list[str], answer: list[Any], tag: str = "answer") -> list[float | None]:
    """Intersection over union of the written and the expected set of integers: key frames by their numbers."""
    truths_wanted = map(set, truths(answer, integers_of, "indices"))
    rows = ((set(numbers_in(written)), truth) for written, truth in _rows(completions, truths_wanted, tag))
    return [len(numbers & truth) / len(numbers | truth) if truth else None for numbers, truth in rows]


@reads("number", number_of)
def rating(
    completions: list[str],
    answer: list[Any],
    tag: str = "answer",
    scale: float = 0.3,
    low: float = 1.0,
    high: float = 5.0,
) -> list[float | None]:
    """exp(-|written - expected| / scale), both clipped to [low, high]; 0 for anything but one number: Q-Hawkeye.

    Raises ValueError if an expected answer is not a number.
    """

    def clipped(value: float) -> float:
        return min(max(value, low), high)

    rows = _rows(completions, truths(answer, number_of, "rating"), tag)
    pairs = ((number_in(written), truth) for written, truth in rows)
    return [
        None if truth is None else 0.0 if value is None else math.exp(-abs(clipped(value) - clipped(truth)) / scale)
        for value, truth in pairs
    ]


@reads("text", text_of)
def words(completions: list[str], answer: list[Any], tag: str = "answer") -> list[float | None]:
    """max(0, 1 - word error rate): edits between the words of the answer and of the expected text, over the latter."""
    return [
        max(0.0, 1.0 - Levenshtein.distance(plain(written).split(), truth) / len(truth)) if truth else None
        for written, truth in _rows(completions, map(str.split, truths(answer, text_of, "words")), tag)
    ]


def tag_format(completions: list[str], tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """1 if the completion is exactly these tags in this order, each once, closed and not empty, nothing in between.

    The first tag may be open already: chat templates of reasoning models write `<think>` into the prompt.
    """
    body = r"\s*".join(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in tags)
    pattern = re.compile(rf"\s*{body}\s*", re.DOTALL)

    def score(completion: str) -> float:
        if tags and f"<{tags[0]}>" not in completion:
            completion = f"<{tags[0]}>{completion}"
        once = all(completion.count(f"<{tag}>") == completion.count(f"</{tag}>") == 1 for tag in tags)
        match = pattern.fullmatch(completion) if once else None
        return float(match is not None and all(part.strip() for part in match.groups()))

    return [score(completion) for completion in completions]


def votes_of(
    completions: Iterable[str], group: Sequence[int], tag: str
) -> tuple[list[str | None], dict[int, Counter[str]]]:
    """The answers without case and white space (None for a missing one), and how often each occurs in its group."""
    answers = (answer_in(completion, tag) for completion in completions)
    plain = [None if text is None else " ".join(text.split()).casefold() for text in answers]
    votes: dict[int, Counter[str]] = {}
    for number, text in zip(group, plain, strict=True):
        if text is not None:
            votes.setdefault(number, Counter())[text] += 1
    return plain, votes


def majority(completions: list[str], group: list[int], tag: str = "answer") -> list[float]:
    """1 if the answer is the most frequent one of its group: SPINE's reward, which needs no labels.

    Answers are compared without case and white space. Of equally frequent ones the first to appear wins; a completion
    without an answer scores 0 and has no vote.
    """
    plain, votes = votes_of(completions, group, tag)
    # Counter.most_common keeps the order of appearance among equals
    winner = {number: counter.most_common(1)[0][0] for number, counter in votes.items()}
    return [float(text is not None and text == winner[number]) for number, text in zip(group, plain, strict=True)]


def diversity(completions: list[str], group: list[int], tag: str = "answer") -> list[float | None]:
    """Entropy of a group's answers over that of all different ones, in [0, 1]: how open a question still is.

    For pictures synthesised from a description, this is Syn-GRPO's reward for the description; the formula is ours.
    Answers as in `majority`. No score without an answer, and none for a group with one answer.
    """
    plain, votes = votes_of(completions, group, tag)
    spread: dict[int, float] = {}
    for number, counter in votes.items():
        total = counter.total()
        if total > 1:
            entropy = -math.fsum(count / total * math.log(count / total) for count in counter.values())
            spread[number] = min(1.0, entropy / math.log(total))
    return [None if text is None else spread.get(number) for number, text in zip(group, plain, strict=True)]


@reads("text", text_of)
def rouge(completions: list[str], answer: list[Any], tag: str = "answer") -> list[float | None]:
    """Mean of the F scores of ROUGE-1, -2 and -L between the answer and the expected text, for free answers.

    On words in lower case without punctuation, no stemming (GRPO-CARE and Conan take this mean).
    """
    scores: list[float | None] = []
    for text, expected in _rows(completions, truths(answer, text_of, "rouge"), tag):
        written, truth = (re.findall(r"\w+", row.casefold()) for row in (plain(text), expected))
        parts = [_f_score(LCSseq.similarity(written, truth), len(written), len(truth))]
        for size in (1, 2):
            ours, theirs = (Counter(zip(*(row[k:] for k in range(size)), strict=False)) for row in (written, truth))
            if theirs:  # an expected answer of one word has no pairs of words
                parts.append(_f_score((ours & theirs).total(), ours.total(), theirs.total()))
        scores.append(math.fsum(parts) / len(parts) if truth else None)
    return scores


def _f_score(common: int, written: int, wanted: int) -> float:
    return 2 * common / (written + wanted) if written + wanted else 0.0


def ndcg_of(ranked: Sequence[str], relevant: Sequence[str]) -> float:
    """Normalised discounted cumulative gain of a ranked list, in [0, 1]: VRAG-RL's reward for retrieved pages.

    A relevant page at position k, counted from 0, has gain 1 / log2(k + 2); repeated pages take no position. 0 if no
    page is relevant.
    """
    relevant_set = set(relevant)
    first = dict.fromkeys(ranked)
    gain = math.fsum(1 / math.log2(k + 2) for k, page in enumerate(first) if page in relevant_set)
    best = math.fsum(1 / math.log2(k + 2) for k in range(len(relevant_set)))
    return gain / best if relevant_set else 0.0
