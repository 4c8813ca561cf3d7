"""The one reader of expected answers, and of numbers, letters and boxes in what a model wrote, for all rules alike.

A value is read whole or refused with ValueError. Of an expected answer None, NaN, a blank text and an empty list are
*nothing*: such a row has no score. A whole number that became a float (pandas does that to a column with gaps) is read
as the whole number. Dashes, digits, fractions and spaces of Unicode mean what their plain forms mean.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from genrl_rewards.rows import NOTHING as NOTHING

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_DASHES = "\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe58\ufe63\uff0d"
_PLAIN_FORMS = str.maketrans(
    dict.fromkeys(_DASHES, "-")
    | dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad")
    | {"\u2044": "/", "\u2215": "/", "\u066b": ".", "\u066c": ",", "\u2018": "'", "\u2019": "'"}
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"')
)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+±]?)(?P<gap>\s*)(?P<money>[$€£¥]?\s*)"
    rf"(?<!\d)(?P<whole>\d+\s+(?=\d+\s*/))?(?P<above>{_DIGITS})(?:\s*/\s*(?P<below>\d+(?:\.\d+)?))?",
    re.ASCII | re.IGNORECASE,
)
_LISTED = re.compile(r"(?<!\d)[-+]?\d+(?:\.\d+)?", re.ASCII)  # 10-20 is two positive numbers
_PLACE = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_COORDINATE = re.compile(rf"(?<![\w.]){_PLACE}", re.ASCII)  # bbox_2d has none
_SIZED = re.compile(r"\b(?:w|h|width|height)\b\W{0,2}[:=]", re.IGNORECASE)
"""x, y, width, height are no corners."""
_LETTERS = re.compile(r"[\s(]*[A-Za-z][\s).]*(?:(?:[,;/&]|and|\s)[\s(]*[A-Za-z][\s).]*)*")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<=\d)\s*({'|'.join(SCALES)})\b", re.IGNORECASE)
_SUFFIXED = re.compile(r"(?<=\d)(k|mn|bn)\b")
_HEDGES = "not|than|least|most|below|above|under|over|half"
_BOUND = re.compile(rf"(?:(?:[<≤≥≠]|(?:^|[\s(])>)=?|\b(?:{_HEDGES}))\s*$", re.IGNORECASE)
_OTHER = re.compile(r"[KMBT]\b|\s*(?:dozens?|score|gross|or (?:more|less|fewer|above|below))\b")
"""What stands behind a number that is another one, or not known: of 300K nobody says whether it is a temperature."""
_TIMES_TEN = re.compile(r"(?<=\d)\s*(?:[x×*·]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?([-+]?\d+)\}?")
_CORNERS = (("x1", "y1", "x2", "y2"), ("left", "top", "right", "bottom"), ("xmin", "ymin", "xmax", "ymax"))
_PLACES = {4: _CORNERS, 2: (("x", "y"), ("start", "end"))}


def reads(kind: str, reader: Callable[[Any], Any], column: str = "answer") -> Callable[[F], F]:
    """Give a rule `read_row(**columns)`: as what it reads its column, for `genrl_rewards.rows` to count; and
    `read_value`, which is what it reads there."""

    def read_row(**columns: Any) -> str:
        value = reader(columns[column])
        if value is None or (hasattr(value, "__len__") and not len(value)):
            return NOTHING
        if isinstance(own_kind := getattr(value, "kind", None), str):
            return own_kind
        first = value if kind != "text" or isinstance(value, str) else value[0]
        return "number" if kind == "text" and _NUMBER.fullmatch(first) else kind

    def marked(rule: F) -> F:
        rule.read_row = read_row  # type: ignore[attr-defined]
        rule.read_value = lambda **columns: reader(columns[column])  # type: ignore[attr-defined]
        return rule

    return marked


def truths(answer: Iterable[Any], reader: Callable[[Any], T], rule: str) -> list[T]:
    """Each expected answer as `reader` reads it. Raises ValueError, naming the rule and the row, as the reader does."""
    values = []
    for row, value in enumerate(answer):
        try:
            values.append(reader(value))
        except ValueError as error:
            raise ValueError(f"{rule}: row {row}: {error}") from error
    return values


def raised(text: str, brace: Callable[[str], str] = lambda digits: f"^{digits}") -> str:
    """A text with its superscripts written as powers."""
    return _RAISED.sub(lambda run: brace("".join(_SUPERSCRIPTS[letter] for letter in run[0])), text)


def plain(text: str) -> str:
    """A text with dashes, quotes, digits, fractions, powers and spaces of Unicode in their plain forms, and no marks
    that nobody sees: `−２½ cm²` is `-2 1/2 cm^2`."""
    if text.isascii():
        return text
    # Before the fold: NFKC makes 21/2 of 2½.
    spaced = re.sub(
        r"(?<=\d)(.)", lambda one: (" " if _is_fraction(one[1]) else "") + one[1], raised(text), flags=re.DOTALL
    )
    folded = unicodedata.normalize("NFKC", spaced.translate(_PLAIN_FORMS)).translate(_PLAIN_FORMS)
    return "".join(str(unicodedata.decimal(letter, letter)) for letter in folded)


def _is_fraction(letter: str) -> bool:
    return unicodedata.decomposition(letter).startswith("<fraction>")


def is_nothing(value: Any) -> bool:
    """Whether an expected answer is None, NaN, a blank text, or a list with nothing else in it."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple | set):
        return all(map(is_nothing, value))
    if isinstance(value, float | np.floating):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def _one(value: Any) -> Any:
    """A value without the list of one, or the NumPy type, that it stands in."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1 and not isinstance(value[0], list | tuple):
        return _one(value[0])
    return value


def forms_of(value: Any) -> tuple[str, ...]:
    """The texts that an expected answer may be written as, the plainest first: 3.0 is `3` or `3.0`; () for nothing.

    Raises ValueError for several answers, and for what is neither text nor number.
    """
    value = _one(value)
    if is_nothing(value):
        return ()
    if isinstance(value, list | tuple | set):
        raise ValueError(f"the expected answer is {value!r:.80}, {len(value)} of them; write one (anls takes several)")
    if isinstance(value, float) and value.is_integer():
        return str(int(value)), str(value)
    if not isinstance(value, str | int | float) and not hasattr(value, "as_integer_ratio"):
        raise ValueError(f"the expected answer is {value!r:.80}, a {type(value).__name__}; write a text or a number")
    forms = [plain(str(value))]
    if isinstance(value, float) and float(np.float32(value)) == value:  # of a column in single precision
        forms.append(str(np.float32(value)))
    return tuple(dict.fromkeys(forms))


def text_of(value: Any) -> str:
    """The plainest of `forms_of`; "" for nothing."""
    return next(iter(forms_of(value)), "")


def texts_of(value: Any) -> list[str]:
    """Several expected texts, of which any may be written."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    several = value if isinstance(value, list | tuple | set) else [value]
    return [text for entry in several if (text := text_of(entry))]


def number_in(text: str) -> float | None:
    """The only number in a text: `-1,234.5`, `− 5`, `-$5`, `minus 5`, `3/4`, `2½`, `3 × 10⁸`, `1.5 million`, with words
    and units around it. None if there is not one, if it is a bound (`at least 5`) or part of another one (`3 dozen`,
    `5!`, `300K`), or its sign may be a dash between words (`result - 5`)."""
    # Thousands: before `plain`, which makes a common space of a narrow match.
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f'’_](?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=[A-Za-z°])\^\{?-?\d+\}?", "", plain(text))  # of a unit: cm^2
    text = re.sub(r"\b(?:minus|negative)\s+(?=[$€£¥]?[\d.])", "-", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<![\d.])10\s*(?:\^|\*\*)\s*\{?([-+]?\d+)\}?", r"1e\1", _TIMES_TEN.sub(r"e\1", text))
    text = _SCALED.sub(lambda word: f"e{SCALES[word[1].lower()]}", text)
    text = _SUFFIXED.sub(lambda word: {"k": "e3", "mn": "e6", "bn": "e9"}[word[1]], text)
    matches = [*_NUMBER.finditer(text)]
    # Which of several numbers is meant is a guess, and policies would learn to write all of them.
    if len(matches) != 1:
        return None
    (match,) = matches
    before = text[: match.start()]
    factorial = not before.strip() and text[match.end() :].strip() == "!"
    if _BOUND.search(before) or _OTHER.match(text, match.end()) or factorial:
        return None
    sign = match["sign"]
    if sign == "±" or (sign and match["gap"] and before.strip()[-1:].isalnum()):
        return None
    above, below = float(match["above"].replace(",", "")), float(match["below"] or 1)
    value = float(match["whole"] or 0) + above / below if below else math.nan
    negative = sign == "-" and not before[-1:].isalpha()  # of covid-19 it is none
    return (-value if negative else value) if math.isfinite(value) else None


def number_of(value: Any) -> float | None:
    """The number of an expected answer, None for nothing. Raises ValueError where it is not one number."""
    text = text_of(value)
    number = number_in(text)
    if number is None and text:
        raise ValueError(f"the expected answer is {value!r:.80}, which is not one number")
    return number


def numbers_in(text: str) -> list[float]:
    """Every plain number in a text, in order: the places of `[10, 20, 30.5, − 40]`."""
    text = re.sub(r"(^|[\[(,;:=])(\s*)-\s+(?=\d)", r"\1\2-", plain(text))
    return [value for value in map(float, _LISTED.findall(text)) if math.isfinite(value)]


def letters_in(text: str) -> set[str]:
    """The choices that a text names, as capital letters: `B`, `(b)`, `A, C`, `A and C`, or `B: a red cube`.

    Empty for a sentence, so that its articles and pronouns do not count as choices.
    """
    text = re.sub(r"\\(?:boxed|text)(?=\{)|[*$`\"'\[\]{}]", "", plain(text)).strip()
    if len(text) <= 200 and _LETTERS.fullmatch(text):
        return {letter.upper() for letter in re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", text)}
    leading = re.match(r"\s*\(?([A-Z])[.:)]", text)
    return {leading[1]} if leading else set()


def letters_of(value: Any) -> set[str]:
    """The letters of an expected answer, a text or a list of them. Raises ValueError where there is none."""
    text = ", ".join(texts_of(value))
    if text and not letters_in(text):
        raise ValueError(f"the expected answer is {value!r:.80}, which names no letter A to Z")
    return letters_in(text) if text else set()


def integers_of(value: Any) -> list[int]:
    """The whole numbers of an expected list, or of its text. Raises ValueError for others."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if is_nothing(value):
        return []
    if isinstance(value, str):
        listed = [] if re.search(r"[^\W\d_]", value) else numbers_in(value)
    else:
        listed = list(value) if isinstance(value, list | tuple) else [value]
    whole = [one for one in listed if isinstance(one, int | float) and not isinstance(one, bool) and one == one // 1]
    if not whole or len(whole) != len(listed):
        raise ValueError(f"the expected answer is {value!r:.80}; write whole numbers, as [3, 1, 2]")
    return [int(number) for number in whole]


def coordinates_in(text: str, count: int) -> list[float]:
    """The `count` numbers of the last box (4) or point (2) in a text: of a mapping by its keys, else the last bracketed
    list of so many, else all numbers if they are so many. [] if there is none."""
    text = re.sub(r"([\[(,;:=]\s*)-\s+(?=\d)", r"\1-", plain(text))
    # The last one counts: models think in boxes before they answer with one.
    for block in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            return box_of(json.loads(block), (count,))
        except ValueError:
            if _SIZED.search(block):
                return []
    bracketed = re.compile(rf"[\[(<]\s*({_PLACE}(?:\s*[,;\s]\s*{_PLACE}){{{count - 1}}})\s*[\])>]", re.ASCII)
    for shown in (text, re.sub(r"[\])]\s*,?\s*[\[(]", ", ", text)):  # then [[10, 20], [30, 40]] too
        if last := bracketed.findall(shown):
            return [float(one) for one in re.findall(_PLACE, last[-1])]
    numbers = [] if _SIZED.search(text) else [float(one) for one in _COORDINATE.findall(text)]
    return numbers if len(numbers) == count and all(map(math.isfinite, numbers)) else []


def box_of(value: Any, sizes: Sequence[int] = (4, 2)) -> list[float]:
    """The numbers of an expected box (4), or interval or point (2): a list, a mapping with such a list or with named
    corners, or either as text; [] for nothing. Raises ValueError for anything else."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if is_nothing(value):
        return []
    sizes_text = " or ".join({4: "4 numbers (left, top, right, bottom)", 2: "2"}[size] for size in sizes)
    coordinates: list[Any]
    refused = ValueError(f"the expected box is {value!r:.80}; a box has {sizes_text}")
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            if isinstance(listed := json.loads(value), list):
                return box_of(listed, sizes)  # which has one box, not the last of several
        coordinates = next((numbers for size in sizes if (numbers := coordinates_in(value, size))), [])
    elif isinstance(value, Mapping):
        lists = [entry for entry in value.values() if isinstance(entry, list | tuple)]
        named = [keys for size in sizes for keys in _PLACES[size] if set(keys) <= value.keys()]
        named = [] if value.keys() & {"w", "h", "width", "height"} else named
        coordinates = box_of(lists[0], sizes) if len(lists) == 1 else [value[key] for key in named[0]] if named else []
    else:
        coordinates = list(value) if isinstance(value, list | tuple) else []
        while len(coordinates) == 1 and isinstance(coordinates[0], list | tuple):
            coordinates = list(coordinates[0])
        if len(coordinates) == 2 and all(isinstance(entry, list | tuple) for entry in coordinates):  # two corners
            coordinates = list(chain(*coordinates))
    kinds = (int, float)
    if len(coordinates) not in sizes or not all(
        isinstance(entry, kinds) and not isinstance(entry, bool) for entry in coordinates
    ):
        raise refused
    numbers = [float(entry) for entry in coordinates]
    if not all(map(math.isfinite, numbers)):
        raise refused
    return numbers


def corners_of(value: Any, sizes: Sequence[int] = (4, 2)) -> list[float]:
    """`box_of` of a box or an interval, whose later corner is not before its first. Raises ValueError otherwise."""
    box = box_of(value, sizes)
    half = len(box) // 2
    if any(box[k + half] < box[k] for k in range(half)):
        text = "its second corner is before its first; write left, top, right, bottom, not a width and a height"
        raise ValueError(f"the expected box is {value!r:.80}: {text}")
    return box
