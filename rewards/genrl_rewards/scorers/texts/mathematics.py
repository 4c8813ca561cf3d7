r"""Answers in mathematics, compared by math-verify: `\frac{1}{2}`, `0.5`, `1/2` and `50\%` are one.

Follows the contract of `genrl_rewards.contract` as `verifiable` does.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from genrl_rewards.scorers.texts.expected import is_nothing, reads, text_of, truths
from genrl_rewards.scorers.texts.formulas import HEDGES, Written, written
from genrl_rewards.scorers.texts.verifiable import answer_in, choice

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

    By math-verify (extra `math`), of what `formulas` reads: `2√3`, `5x+3`, `1:2`, `3e8`. Units are read past, decimals
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
