"""Answers in mathematics: what is equal, what cannot be read, what takes too long, and threads."""

import importlib.util
import math
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from genrl_rewards.scorers.texts import mathematics
from genrl_rewards.scorers.texts.completions import load_text, score_completions

rule = mathematics.math


@pytest.fixture(autouse=True, scope="module")
def needed() -> None:
    pytest.importorskip("math_verify")


EQUAL = [  # some of real data; what is written without LaTeX was once read as prose, of which one number counted
    (r"\frac{1}{2}", 0.5), ("1/2", r"$\frac{1}{2}$"), (r"\boxed{50\%}", "0.5"), ("x = 5", "5"), ("1,234", 1234),
    ("3 apples", "3"), (r"\sqrt{2}", r"2^{1/2}"), ("(1, 2)", "(1,2)"), ("x^2 + 2x + 1", "(x+1)^2"),
    (r"\sqrt{884}", r"2 \sqrt { 221 }"), (r"\frac{1}{\sqrt{3}}", r"\frac { \sqrt { 3 } } { 3 }"), ("12", "12 cm"),
    (r"12 \text{ cm}", "12"), ("45", r"45^\circ"), ("[1,3)", "[1, 3)"), (r"\{2,1\}", r"\{1,2\}"), ("3 + 5x", "5x+3"),
    ("2:4", "1:2"), ("2:4:6", "1:2:3"), ("3 × 10⁸", "3e8"), (r"4\pi", "4π"), (r"2\sqrt{3}", "2√3"), ("+3", "3"),
    ("−5", "-5"), ("x²", "x^2"), ("45°", "45"), ("2½", "2.5"), ("½ x", "x/2"), ("x ≤ 3", r"x \le 3"),
    ("1.5 million", "1500000"), (r"\frac{1}{3}", r"0.\overline{3}"), ("5m", "5 m"),
    ("The answer is $72.", "so 60 + 12 = 72\n#### 72"), (3, 3.0),
]  # fmt: skip
UNEQUAL = [
    ("(2, 1)", "(1,2)"), ("0.333", "1/3"), ("-1", "1"), ("", "3"), ("no idea", "3"), ("29", r"2 \sqrt{221}"),
    ("(1,3)", "[1, 3)"), ("5x+4", "5x+3"), ("3x+2y=6", "2x+3y=6"), ("1:4", "1:2"), ("3e8", "3"), ("4", "4π"),
    ("2", "2√3"), ("5", "−5"), ("x = 5", "x = 5 or x = -5"), ("the answer is 5x+4", "5x+3"), ("at least 5", "5"),
    ("5 or 6", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "truth", "right"), [(*e, True) for e in EQUAL] + [(*u, False) for u in UNEQUAL])
def test_what_is_equal(written: str, truth: object, right: bool) -> None:
    assert rule([f"<answer>{written}</answer>"], [truth]) == [float(right)]


@pytest.mark.parametrize(
    "truth", ["the red one", "5 or more", "at least 5", "y = 2x+1 if x > 0", "1 2", "0.333...", "yes", ["1", "2"]]
)
def test_an_expected_answer_that_is_not_read_whole_is_refused(truth: object) -> None:
    with pytest.raises(ValueError, match=r"math: row 0: the expected answer"):
        rule(["<answer>5</answer>"], [truth])


def test_a_truth_that_cannot_be_read_gives_no_score_and_is_counted() -> None:
    columns = {"answer": ["the red one", "", "2"]}
    twos = ["<answer>2</answer>"] * 3
    scores = score_completions(load_text("math"), prompts=["q"] * 3, completions=twos, columns=columns)
    assert [math.isnan(value) for value in scores.values] == [True, True, False] and scores.values[2] == 1.0
    (failure,) = scores.failures
    assert failure.rows == (0,) and "'the red one' holds neither a number nor a formula" in failure.error


def _in_a_fork(numbers: list[int]) -> list[float | None]:
    return rule([f"<answer>{n}/4</answer>" for n in numbers], [0.25 * n for n in numbers])


def test_forked_processes_and_threads_get_their_own_answers() -> None:
    assert _in_a_fork([3]) == [1.0]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_in_a_fork, [[n, n + 1] for n in range(1, 9)], chunksize=1) == [[1.0, 1.0]] * 8
    assert _in_a_fork([5]) == [1.0]
    with ThreadPoolExecutor(4) as pool:
        pairs = list(pool.map(lambda n: rule([f"<answer>{n}/4</answer>"], [0.25 * (n if n % 2 else n + 1)]), range(16)))
    assert pairs == [[float(n % 2)] for n in range(16)]


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_read() -> None:
    huge = f"{'9' * 7}^{{{'9' * 9}}}"
    assert mathematics.Comparer().ask(2.0, truth="$3$", written=f"${huge}$") is None
    assert rule([f"<answer>{huge}</answer>", "<answer>7</answer>"], ["3", "7"], timeout_s=2.0) == [0.0, 1.0]


def test_a_process_that_ends_is_an_error_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "__file__", "/nowhere/mathematics.py")
    with pytest.raises(RuntimeError, match="ended; its error is above"):
        mathematics.Comparer().ask(5.0, truth="1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'math-verify"):
        load_text("math")
