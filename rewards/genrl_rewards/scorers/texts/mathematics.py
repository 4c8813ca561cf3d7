r"""Answers in mathematics, compared by math-verify: `\frac{1}{2}`, `0.5`, `1/2` and `50\%` are one.

Follows the contract of `genrl_rewards.contract` as `verifiable` does.

Mathematics is read as people write it, in LaTeX which math-verify reads whole: `2√3`, `5x+3`, `1:2`, `3e8`, `x²`, `12
cm`. math-verify takes a text without LaTeX for prose and compares one number of it. So a text is split here into a
formula and what is left over, which of an expected answer may only be a unit.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import subprocess
import sys
import threading
import unicodedata
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from genrl_rewards.scorers.texts.expected import SCALES, is_nothing, plain, raised, reads, text_of, truths
from genrl_rewards.scorers.texts.verifiable import answer_in, choice

_SYMBOLS = {
    **{"π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx "},
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap "},
    **{"∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda "},
    **{"μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ", "δ": r"\delta ", "Δ": r"\Delta ", "∈": r"\in "},
    **{"**": "^", "<=": r"\leq ", ">=": r"\geq ", "!=": r"\neq ", "==": "=", "*": r"\cdot ", "′": "'", "∠": r"\angle "},
}
_FUNCTIONS = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc")
_NAMES = (*_FUNCTIONS, "log", "ln", "exp", "max", "min", "lim", "gcd", "pi", "infty", "sqrt")
_NAME = re.compile(rf"(?<![A-Za-z\\])(?:infinity|({'|'.join(_NAMES)}))(?![A-Za-z])")
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_UNITS = frozenset(
    "mm cm dm km in ft yd mi mg kg lb lbs oz ml cl mL kL hr hrs min mins sec secs ms ns Hz kHz kW kWh kJ kN kPa Pa mol "
    "rad deg mph kph mA kV kB MB GB am pm".split()
)
_STOP = frozenset(
    "or and to of if is no not than then at least most more less fewer between plus minus times over per cent half "
    "dozen when where for but from up down under above below either both all any other except".split()
)
_ENVIRONMENT = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_UNIT = r"(?:[mgshLlNJWVAKCFT](?:\^\{-?\d\})?)"
_WITH_UNIT = r"((?:\\[A-Za-z]+|[^A-Za-z\\])*\d[}%)]*)GAPUNIT(?:/UNIT)*".replace("UNIT", _UNIT)
"""A number and a unit of one letter, which might be a variable."""
HEDGES = frozenset("or not no than least most more less fewer between if except over half dozen either".split())
"""Words beside a number by which it is not the answer."""
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)%?")


class Written(NamedTuple):
    """What a text says as mathematics."""

    formula: str
    """LaTeX between dollars; "" where there is neither a number nor a formula."""
    left: str = ""
    """What is neither in the formula nor a unit behind it."""

    @property
    def kind(self) -> str:
        """`number` or `formula`."""
        return "number" if _PLAIN_NUMBER.fullmatch(self.formula.strip("$").strip()) else "formula"

    @property
    def constant(self) -> bool:
        """Whether it has no variables."""
        return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", self.formula)) is None


def written(text: str, gap: str = r"\s+") -> Written:
    """The formula of a text, and what is left over of it.

    gap: what stands between a number and a letter that is its unit, such as the m of `5 m` but not of `5m`.
    """
    text = text.rsplit("####", 1)[-1]  # GSM8K's answers end so
    text = re.sub("[₀-₉]+", lambda run: f"_{{{run[0].translate(_SUBSCRIPTS)}}}", text)
    text = _boxed(raised(text, lambda digits: f"^{{{digits}}}"))
    parts = [next(filter(None, groups)) for groups in _ENVIRONMENT.findall(text)]
    if parts:
        outside = plain(_ENVIRONMENT.sub(" ", text))
        words = [word for word in re.findall(r"[^\s,.;]+", outside) if word not in ("or", "and")]
        return Written(f"${', '.join(map(_latex, parts))}$", "" if _are_units(words) else " ".join(words))
    body = _latex(text)
    before, inside, after = _between_words(body)
    if not re.search(r"[A-Za-z0-9]", inside):
        return Written("", body)
    if number := re.fullmatch(_WITH_UNIT.replace("GAP", gap), inside.strip()):
        inside = number[1]
    # Two numbers side by side are no product that anybody writes; math-verify would read the first alone.
    if re.search(r"(?<![_^\d])\d+\s+\d", inside):
        return Written("", body)
    left = [*before, *([] if _are_units(after) and re.search(r"\d", inside) else after), *_words(inside)]
    left += re.findall(r"\.{2,}|\\[lc]?dots", inside)
    return Written(f"${inside.strip()}$", " ".join(left))


def _boxed(text: str) -> str:
    """What is in the last `\\boxed{...}` of a text, if there is one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    begin = place = start + len("\\boxed{")
    depth = 1
    while place < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        place += 1
    return text[begin : place - 1] if not depth else text[begin:]


def _latex(text: str) -> str:
    """A formula, or words with one, in LaTeX."""
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f'’](?=\d{3}(?!\d))", "", text)
    text = _VULGAR.sub(_vulgar, text)
    text = re.sub(r"[√∛]\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))", _root, text)
    text = plain(
        re.sub("[" + "".join(k for k in _SYMBOLS if not k.isascii()) + "]", lambda one: _SYMBOLS[one[0]], text)
    )
    text = re.sub(r"\*\*|[<>!=]=|\*", lambda one: _SYMBOLS[one[0]], text)
    text = re.sub(r"\\[,;!: ]|~", " ", text).replace("\\$", "").replace("\\left", "").replace("\\right", "")
    text = _TEXT.sub(r" \1 ", text).replace("{,}", ",").strip().removesuffix(".")
    text = re.sub(r"(?<=\d)\s*percent\b", r"\\%", re.sub(r"(?<!\\)%", r"\\%", text))
    text = re.sub(r"(?<=\d)\s*degrees?\b", r"^\\circ ", re.sub(r"^([-+]?)\s*[$€£¥]\s*", r"\1", text))
    text = re.sub(r"(?<![\d.])((?:\d{1,3})(?: \d{3})+)(?![\d])", lambda one: one[1].replace(" ", ""), text)
    text = re.sub(r"(?<![A-Za-z\d])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![A-Za-z\d])", r"\1 \\times 10^{\2}", text)
    text = re.sub(rf"(?<=\d)\s*({'|'.join(SCALES)})\b", lambda word: rf" \times 10^{{{SCALES[word[1]]}}}", text)
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", _repeating, text)
    text = re.sub(r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _NAME.sub(lambda name: f"\\{name[1] or 'infty'} ", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", re.sub(r"\^\s*(-?\d+)", r"^{\1}", text))
    text = re.sub(r"\b(?:minus|negative)\s+(?=[\d.])", "-", text, flags=re.IGNORECASE)
    text = re.sub(r"((?:^|[=(,\[{:])\s*[-+])\s+(?=[\d.\\])", r"\1", text)
    text = re.sub(r"((?:^|[=(,\[{:])\s*)\+(?=[\d.\\])", r"\1", text)  # math-verify reads no +1,200
    text = re.sub(r"\b([A-Za-z]) (?:is|equals) ", r"\1 = ", text)
    text = re.sub(r"\s+(?:or|and)\s+|\s*;\s*", ", ", text)
    return re.sub(r"(?<![\d:.])(\d+(?:\.\d+)?)((?:\s*:\s*\d+(?:\.\d+)?){2,})(?![\d:.])", _ratio, text)


def _vulgar(match: re.Match[str]) -> str:
    """A fraction that is one letter: `½ x` is half of x, where `1/2 x` may be one over 2x."""
    above, below = unicodedata.normalize("NFKC", match[0]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}} "


def _root(match: re.Match[str]) -> str:
    degree = "[3]" if match[0][0] == "∛" else ""
    return rf"\sqrt{degree}{{{match[1] or match[2]}}}"


def _repeating(match: re.Match[str]) -> str:
    integer, fixed, repeated = match[1] or "0", match[2], match[3]
    value = int(integer + fixed) + Fraction(int(repeated), 10 ** len(repeated) - 1)
    value /= 10 ** len(fixed)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _ratio(match: re.Match[str]) -> str:
    """Three and more parts as parts of the first, since math-verify divides two."""
    first, *others = (Fraction(part.strip()) for part in match[0].split(":"))
    if not first:
        return match[0]
    return "(" + ", ".join(str(part / first) for part in (first, *others)) + ")"


def _words(text: str) -> list[str]:
    """Words of a text that are no products of letters, names of functions or LaTeX."""
    words = [word[0] for word in _WORD.finditer(re.sub(r"\\[A-Za-z]+(?:\{[a-z]*matrix\}|\{cases\})?", " ", text))]
    return [word for word in words if len(word) > 2 or word in _UNITS or word.lower() in _STOP]


def _between_words(body: str) -> tuple[list[str], str, list[str]]:
    """The words before a formula, the formula, the words behind it. An `=` or `:` behind the first goes with them."""
    spaced = re.sub(r"(?<=[\d}])(?=[A-Za-z]{2,}\b)", " ", body) if _words(body) else body
    pieces = spaced.split()
    wordy = [bool(_words(piece)) and not re.search(r"[\d\\^=+]", re.sub(r"\^\{-?\d+\}", "", piece)) for piece in pieces]
    first = next((k for k, word in enumerate(wordy) if not word), len(pieces))
    last = next((k for k in range(len(pieces), 0, -1) if not wordy[k - 1]), 0)
    inside = " ".join(pieces[first:last])
    return pieces[:first], re.sub(r"^[=:]\s*", "", inside) if first else inside, pieces[last:]


def _are_units(words: list[str]) -> bool:
    """Whether words behind a formula may be a unit, or what is counted: `cm`, `cm^{2}`, `km/h`, `red apples`."""
    plain_words = [re.sub(r"\^\{?-?\d+\}?", "", word).strip(".,") for word in words]
    return len(words) <= 3 and all(
        re.fullmatch(r"[A-Za-z]+(?:/[A-Za-z]+)*", word) and word.lower() not in _STOP for word in plain_words if word
    )


START_S = 120.0
"""Seconds in which the process must have imported sympy."""


def formula_of(value: Any) -> Written | None:
    """The formula of an expected answer, None for nothing. Raises ValueError where there is none, or more than it."""
    text = text_of(value) if not isinstance(value, str) else value
    if is_nothing(value):
        return None
    formulas = written(text)
    if not formulas.formula:
        raise ValueError(f"the expected answer {text!r:.80} holds neither a number nor a formula")
    if formulas.left:
        raise ValueError(f"the expected answer {text!r:.80} is not read whole: {formulas.left!r:.40} is left over")
    return formulas


@reads("formula", formula_of)
def math(completions: list[str], answer: list[Any], tag: str = "answer", timeout_s: float = 5.0) -> list[float | None]:
    r"""1 if the answer equals the expected one as mathematics: `\frac{1}{2}` is `0.5`, and `x = 5` is `5`.

    By math-verify (extra `math`), of what `written` reads: `2√3`, `5x+3`, `1:2`, `3e8`. Units are read past, decimals
    compared to 6 digits. No score where the expected answer is empty; 0 for an answer that cannot be read within
    `timeout_s` seconds, such as `9^{9^{9^9}}`. Raises ValueError for an expected answer that holds neither a number nor
    a formula, or something beside it.
    """
    compare = _comparer(os.getpid())
    scores: list[float | None] = []
    for row, (completion, truth) in enumerate(zip(completions, truths(answer, formula_of, "math"), strict=True)):
        if truth is None:
            scores.append(None)
            continue
        if not compare.ask(timeout_s, truth=truth.formula):
            raise ValueError(f"math: row {row}: the expected answer {answer[row]!r:.80} is not read whole as a formula")
        # beside a number a letter is a unit, in a formula a variable
        formulas = written(answer_in(completion, tag) or "", r"\s*" if truth.constant else r"(?!)")
        # "at least 5", "5 or 7": the right number is in it, and is not what was said.
        hedged = not HEDGES.isdisjoint(formulas.left.lower().split())
        same = formulas.formula and not hedged and compare.ask(timeout_s, truth=truth.formula, written=formulas.formula)
        scores.append(float(bool(same)))
    return scores


def math_or_choice(
    completions: list[str], answer: list[Any], options: list[list[str]], tag: str = "answer", timeout_s: float = 5.0
) -> list[float | None]:
    """`choice` for rows with options, `math` for others: data with both kinds of questions, as MathVista."""
    rows = zip(completions, answer, options, strict=True)
    return [
        (choice([text], [truth], tag) if _several(listed) else math([text], [truth], tag, timeout_s))[0]
        for text, truth, listed in rows
    ]


def _several(options: Any) -> bool:
    return not is_nothing(options)


def _reader(name: str) -> Any:
    """`read_row` or `read_value` of the rule that a row is scored by."""
    return lambda **columns: getattr(choice if _several(columns["options"]) else math, name)(**columns)


math_or_choice.read_row = _reader("read_row")  # type: ignore[attr-defined]
math_or_choice.read_value = _reader("read_value")  # type: ignore[attr-defined]


@cache
def _comparer(process: int) -> Comparer:
    """One for all threads of a process; a process that is forked has its own."""
    return Comparer()


class Comparer:
    """A process of `math_worker`, begun anew after an answer that took too long. Threads take turns."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        atexit.register(self._end)

    def ask(self, timeout_s: float, **asked: str | None) -> bool | None:
        """The answer to a line of `math_worker`; None where it took more than `timeout_s` seconds.

        Raises RuntimeError where the process ends by itself: math-verify is not installed, or broken.
        """
        with self._turn:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                self._end()
                return None
            return bool(json.loads(self._checked(line)))

    def _start(self) -> subprocess.Popen[str]:
        # -P: not the folder of the script, which has modules of other names, before the packages
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        self._lines = queue.Queue()
        threading.Thread(target=_forward, args=(self._process, self._lines), daemon=True).start()
        try:
            self._checked(self._lines.get(timeout=START_S))
        except queue.Empty:
            self._end()
            raise RuntimeError(f"math-verify could not be imported within {START_S:g} seconds") from None
        return self._process

    def _checked(self, line: str) -> str:
        if not line:
            self._end()
            raise RuntimeError("the process of math-verify ended; its error is above. pip install 'math-verify>=0.8'")
        return line

    def _end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            self._process = None


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Each line as it comes, and an empty one at the end: a pipe has no timeout, a queue has."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")
