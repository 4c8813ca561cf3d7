"""Rewards for written answers that a rule can check: exact, numeric, multiple choice, boxes, format, votes.

All follow the contract of `rewards.contract`: `completions` is a list of N generated texts, `answer` the column of the
same name, everything with a default is an option. Scores are in [0, 1]; None where the *data* has nothing to compare
with (an empty `answer`), never for a wrong answer. The answer is what stands in the last `<answer> ... </answer>`; with
`tag: ""` it is the whole completion. Text from a model is parsed, never evaluated.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence

from rapidfuzz.distance import LCSseq, Levenshtein

_NUMBER = re.compile(
    r"(?<!\d)[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?",
    re.ASCII | re.IGNORECASE,
)
_PLAIN = re.compile(r"(?<!\d)[-+]?\d+(?:\.\d+)?", re.ASCII)  # 10-20 is two positive numbers
_LETTERS = re.compile(r"[\s(]*[A-Za-z][\s).]*(?:(?:[,;/&]|and|\s)[\s(]*[A-Za-z][\s).]*)*")


def answer_in(completion: str, tag: str = "answer") -> str | None:
    """The text of the last complete `<tag> ... </tag>`, stripped; None where there is none. tag "": all of it."""
    if not tag:
        return completion.strip()
    found = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", completion, re.DOTALL)
    return found[-1].strip() if found else None


def number_in(text: str) -> float | None:
    """The one number in a text: `-1,234.5`, `3/4`, `1e-3`, with words and units around it. None for none or several."""
    found = _NUMBER.findall(text)
    if len(found) != 1:
        return None
    above, _, below = found[0].replace(",", "").partition("/")
    divisor = float(below) if below else 1.0
    value = float(above) / divisor if divisor else math.nan
    return value if math.isfinite(value) else None


def numbers_in(text: str) -> list[float]:
    """Every plain number in a text, in order: the coordinates of `[10, 20, 30.5, 40]`."""
    return [value for value in map(float, _PLAIN.findall(text)) if math.isfinite(value)]


def letters_in(text: str) -> set[str]:
    """The choices that a text names, as capital letters: `B`, `(b)`, `A, C`, `A and C`, or `B: a red cube`.

    Empty for a sentence, so that its articles and pronouns are no choices.
    """
    if len(text) <= 200 and _LETTERS.fullmatch(text):
        return {letter.upper() for letter in re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", text)}
    leading = re.match(r"\s*\(?([A-Z])[.:)]", text)
    return {leading[1]} if leading else set()


def exact(
    completions: list[str], answer: list[str], tag: str = "answer", ignore_case: bool = True
) -> list[float | None]:
    """1 where the answer is the expected text, apart from white space and (with ignore_case) case."""

    def plain(text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if ignore_case else joined

    def one(completion: str, truth: str) -> float:
        found = answer_in(completion, tag)
        return float(found is not None and plain(found) == plain(truth))

    return [None if truth == "" else one(c, truth) for c, truth in zip(completions, map(str, answer), strict=True)]


def numeric(
    completions: list[str],
    answer: list[float],
    tag: str = "answer",
    decimals: int | None = 2,
    relative: bool = False,
) -> list[float | None]:
    """1 where the answer holds one number, equal to the expected one in `decimals` digits (null: within 1e-9).

    relative: max(0, 1 - |number - expected| / |expected|) instead, for regression (the smaller the error the better).
    Raises ValueError where an expected answer is no number.
    """
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        truth = number_in(str(expected))
        if str(expected) == "":
            scores.append(None)
            continue
        if truth is None:
            raise ValueError(f"numeric: the answer of row {row} is {expected!r}, which is not one number")
        text = answer_in(completion, tag)
        value = None if text is None else number_in(text)
        if value is None:
            scores.append(0.0)
        elif relative:
            scores.append(max(0.0, 1.0 - abs(value - truth) / max(abs(truth), 1e-9)))
        else:
            tolerance = 0.5 * 10.0**-decimals if decimals is not None else 0.0
            scores.append(float(abs(value - truth) <= tolerance + 1e-9))
    return scores


def choice(completions: list[str], answer: list[str], tag: str = "answer", partial: bool = False) -> list[float | None]:
    """1 where the letters of the answer are those expected: `B`, or `A, C` for several right ones.

    partial: chosen / right where nothing wrong was chosen (TW-GRPO's soft accuracy for multiple choice), else 0.
    Raises ValueError where an expected answer names no letter.
    """
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        if expected == "":
            scores.append(None)
            continue
        right = letters_in(expected)
        if not right:
            raise ValueError(f"choice: the answer of row {row} is {expected!r}, which names no letter A to Z")
        chosen = letters_in(answer_in(completion, tag) or "")
        if partial:
            scores.append(len(chosen) / len(right) if chosen <= right else 0.0)
        else:
            scores.append(float(chosen == right))
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


def iou(
    completions: list[str], box: list[Sequence[float] | str], tag: str = "answer", threshold: float | None = None
) -> list[float | None]:
    """Overlap of the written box `[left, top, right, bottom]` with the expected one; 0 for anything but 4 numbers.

    A column `box` of 2 numbers is an interval of time. threshold: 1 from this overlap on, else 0. Both boxes are in
    the coordinates of the same picture: that of the prompt as the model sees it. `box` may be a list or JSON.
    Raises ValueError where an expected box has another number of coordinates.
    """
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, box, strict=True)):
        truth = json.loads(expected) if isinstance(expected, str) and expected else expected
        if not truth:
            scores.append(None)
            continue
        if len(truth) not in (2, 4):
            raise ValueError(f"iou: the box of row {row} is {expected!r}; a box has 4 numbers, an interval 2")
        written = numbers_in(answer_in(completion, tag) or "")
        overlap = iou_of(written, truth) if len(written) == len(truth) else 0.0
        scores.append(overlap if threshold is None else float(overlap >= threshold))
    return scores


def point_in_box(completions: list[str], box: list[Sequence[float] | str], tag: str = "answer") -> list[float | None]:
    """1 where the written point `x, y` is inside of the expected box, its border included."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, box, strict=True):
        truth = json.loads(expected) if isinstance(expected, str) and expected else expected
        written = numbers_in(answer_in(completion, tag) or "")
        if not truth:
            scores.append(None)
        else:
            left, top, right, bottom = truth
            inside = len(written) == 2 and left <= written[0] <= right and top <= written[1] <= bottom
            scores.append(float(inside))
    return scores


def ordering(
    completions: list[str], answer: list[Sequence[int] | str], tag: str = "answer", columns: int = 0
) -> list[float | None]:
    """Share of positions of a list of whole numbers that are right: the full jigsaw of Jigsaw-R1. `3, 1, 2`.

    columns: for pieces laid out row by row in so many columns, the share of neighbours (to the right and below) that
    are neighbours in the true order too, instead. 0 for a list of another length, or one that is no permutation.
    """
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        truth = [int(value) for value in (numbers_in(expected) if isinstance(expected, str) else expected)]
        if not truth:
            scores.append(None)
            continue
        written = [int(value) for value in numbers_in(answer_in(completion, tag) or "")]
        if sorted(written) != sorted(truth):
            scores.append(0.0)
        elif columns:
            wanted = _neighbours(truth, columns)
            scores.append(len(wanted & _neighbours(written, columns)) / max(len(wanted), 1))
        else:
            scores.append(sum(a == b for a, b in zip(written, truth, strict=True)) / len(truth))
    return scores


def indices(completions: list[str], answer: list[Sequence[int] | str], tag: str = "answer") -> list[float | None]:
    """Intersection over union of the written set of whole numbers and the expected one: key frames by their numbers."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        truth = set(numbers_in(expected) if isinstance(expected, str) else map(float, expected))
        written = set(numbers_in(answer_in(completion, tag) or ""))
        scores.append(len(truth & written) / len(truth | written) if truth else None)
    return scores


def rating(
    completions: list[str],
    answer: list[float],
    tag: str = "answer",
    scale: float = 0.3,
    low: float = 1.0,
    high: float = 5.0,
) -> list[float | None]:
    """exp(-|written - expected| / scale), both clipped to [low, high]; 0 for anything but one number: Q-Hawkeye.

    Raises ValueError where an expected answer is no number.
    """
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        truth = number_in(str(expected))
        if str(expected) == "":
            scores.append(None)
            continue
        if truth is None:
            raise ValueError(f"rating: the answer of row {row} is {expected!r}, which is not one number")
        written = number_in(answer_in(completion, tag) or "")
        near, far = min(max(truth, low), high), None if written is None else min(max(written, low), high)
        scores.append(0.0 if far is None else math.exp(-abs(far - near) / scale))
    return scores


def _neighbours(pieces: Sequence[int], columns: int) -> set[tuple[int, int, str]]:
    right = {(a, pieces[k + 1], "right") for k, a in enumerate(pieces[:-1]) if (k + 1) % columns}
    return right | {(a, pieces[k + columns], "below") for k, a in enumerate(pieces[:-columns])}


def words(completions: list[str], answer: list[str], tag: str = "answer") -> list[float | None]:
    """max(0, 1 - word error rate): edits between the words of the answer and of the expected text, over the latter."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        truth = expected.split()
        if not truth:
            scores.append(None)
            continue
        written = (answer_in(completion, tag) or "").split()
        scores.append(max(0.0, 1.0 - Levenshtein.distance(written, truth) / len(truth)))
    return scores


def tag_format(completions: list[str], tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """1 where the completion is exactly the tags in this order, each once, closed and not empty, nothing in between."""
    body = r"\s*".join(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in tags)
    pattern = re.compile(rf"\s*{body}\s*", re.DOTALL)

    def one(completion: str) -> float:
        once = all(completion.count(f"<{tag}>") == completion.count(f"</{tag}>") == 1 for tag in tags)
        found = pattern.fullmatch(completion) if once else None
        return float(found is not None and all(part.strip() for part in found.groups()))

    return [one(completion) for completion in completions]


def majority(completions: list[str], group: list[int], tag: str = "answer") -> list[float]:
    """1 where the answer is the most frequent one of its group: SPINE's reward, which needs no labels.

    Answers are compared without case and white space. Of equally frequent ones the first to appear wins; a completion
    without answer has 0 and no vote.
    """
    answers = [answer_in(completion, tag) for completion in completions]
    plain = [None if text is None else " ".join(text.split()).casefold() for text in answers]
    votes: dict[int, Counter[str]] = {}
    for number, text in zip(group, plain, strict=True):
        if text is not None:
            votes.setdefault(number, Counter())[text] += 1
    # Counter.most_common keeps the order of appearance among equals
    winner = {number: counter.most_common(1)[0][0] for number, counter in votes.items()}
    return [float(text is not None and text == winner[number]) for number, text in zip(group, plain, strict=True)]


def diversity(completions: list[str], group: list[int], tag: str = "answer") -> list[float | None]:
    """Entropy of a group's answers over that of all different, in [0, 1]: how much a question is still open.

    For pictures synthesised from a description, this is what Syn-GRPO pays the description; the formula is ours.
    Answers as in `majority`; without an answer: no score, and none for a group of one answer.
    """
    answers = [answer_in(completion, tag) for completion in completions]
    votes: dict[int, Counter[str]] = {}
    for number, text in zip(group, answers, strict=True):
        if text is not None:
            votes.setdefault(number, Counter())[" ".join(text.split()).casefold()] += 1
    spread: dict[int, float] = {}
    for number, counter in votes.items():
        total = counter.total()
        if total > 1:
            entropy = -math.fsum(count / total * math.log(count / total) for count in counter.values())
            spread[number] = min(1.0, entropy / math.log(total))
    return [None if text is None else spread.get(number) for number, text in zip(group, answers, strict=True)]


def rouge(completions: list[str], answer: list[str], tag: str = "answer") -> list[float | None]:
    """Mean of the F scores of ROUGE-1, -2 and -L between the answer and the expected text, for free answers.

    On words in lower case without punctuation, no stemming (GRPO-CARE and Conan take this mean).
    """
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        truth = re.findall(r"\w+", expected.casefold())
        written = re.findall(r"\w+", (answer_in(completion, tag) or "").casefold())
        if not truth:
            scores.append(None)
            continue
        longest = LCSseq.similarity(written, truth)
        parts = [_f_score(longest, len(written), len(truth))]
        for size in (1, 2):
            ours, theirs = (Counter(zip(*(row[k:] for k in range(size)), strict=False)) for row in (written, truth))
            if theirs:  # an expected answer of one word has no pairs of words
                parts.append(_f_score((ours & theirs).total(), ours.total(), theirs.total()))
        scores.append(math.fsum(parts) / len(parts))
    return scores


def _f_score(common: int, found: int, wanted: int) -> float:
    return 2 * common / (found + wanted) if found + wanted else 0.0


def ndcg_of(ranked: Sequence[str], relevant: Sequence[str]) -> float:
    """Normalised discounted cumulative gain of a ranked list, in [0, 1]: VRAG-RL's reward for retrieved pages.

    A relevant page has gain 1 over log2(k + 2) at its place k, counted from 0; pages that come again take no place.
    0 without any relevant.
    """
    wanted = set(relevant)
    first = dict.fromkeys(ranked)
    gain = math.fsum(1 / math.log2(k + 2) for k, page in enumerate(first) if page in wanted)
    best = math.fsum(1 / math.log2(k + 2) for k in range(len(wanted)))
    return gain / best if wanted else 0.0
