"""What votes say, resolved by the key; and what is said of files that cannot be read together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from genrl.runtime.show.compare.page import key_path
from genrl.runtime.show.compare.statistics import accuracy, decided, krippendorff_alpha, same_answers, share, win_rate
from genrl.runtime.show.compare.votes import read
from tests.runtime.show.compare import pages

COUNT = 20
Vote = Callable[..., Path]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    pages.write(tmp_path / "compare.html", COUNT)
    return tmp_path / "compare.html"


@pytest.fixture
def vote(out: Path) -> Vote:
    """Write votes: prompt number -> "a", "b" or "tie"."""

    def write(name: str, choices: dict[int, str], judge: str = "one") -> Path:
        key = json.loads(key_path(out).read_text())
        tokens = {int(pair["prompt"].split()[1]): token for token, pair in key["pairs"].items()}
        side = {k: one if one == "tie" else pages.for_model(key, tokens[k], one) for k, one in choices.items()}
        answers = {tokens[k]: one for k, one in side.items()}
        return pages.votes(out, out.parent / name, answers, judge)

    return write


def test_counts_rates_and_categories(vote: Vote) -> None:
    """Of prompts 0 to 9, B wins the even ones, A wins 1 and 3, and 5, 7 and 9 are ties."""
    choices = {k: "b" if k % 2 == 0 else "a" if k < 4 else "tie" for k in range(10)}
    actual = read([vote("votes.json", choices)])
    assert (actual.a, actual.b, actual.judges, actual.shown) == ("model-before", "model-after", 1, COUNT)
    assert (actual.total.b, actual.total.ties, actual.total.a) == (5, 3, 2)
    assert actual.total.rate.value == 6.5 / 10 and actual.total.rate.count == 10
    wanted = binomtest(5, 7).proportion_ci(method="wilson")
    assert actual.total.decided is not None and actual.total.decided.value == 5 / 7
    assert (actual.total.decided.low, actual.total.decided.high) == pytest.approx((wanted.low, wanted.high))
    assert {name: (t.b, t.ties, t.a) for name, t in actual.categories.items()} == {"even": (5, 0, 0), "odd": (0, 3, 2)}
    assert actual.agreement is None
    choices = {k: "b" for k in range(8)} | {8: "a", 9: "a", 10: "tie"}
    actual = read([vote("votes.json", choices)]).rewards
    shares = {label: (p.accuracy.value, p.accuracy.count, p.equal) for label, p in actual.items() if p.accuracy}
    assert shares == {"good": (0.8, 10, 0), "bad": (pytest.approx(2 / 9), 9, 0), "equal": (0.5, 10, 10)}


def test_the_key_is_found_or_given(vote: Vote, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    votes, elsewhere = vote("votes.json", {0: "b"}), tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = votes.rename(elsewhere / "votes.json")
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ValueError, match=r"no key of the page that .*votes\.json is of in .*give --key FILE"):
        read([moved])
    assert read([moved], key_path(out)).total.b == 1
    monkeypatch.chdir(tmp_path)
    assert read([moved]).total.b == 1


def changed(file: Path, **keys: Any) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return file


def test_votes_that_cannot_be_read(vote: Vote) -> None:
    for keys, says in (
        ({"page": "ffff"}, "no key of the page"),
        ({"votes": {"ffff": "left"}}, "1 votes are of no pair of this page"),
        ({"votes": {"ffff": "up"}}, "'up' is no answer"),
        ({"votes": {"ffff": ["left"]}}, "is no answer"),
        ({"votes": {}}, "there are no votes in it"),
        *(({key: None}, "holds no votes: give the votes.json") for key in ("votes", "format", "judge")),
    ):
        with pytest.raises(ValueError, match=says):
            read([changed(vote("votes.json", {0: "b"}), **keys)])


def test_files_that_do_not_belong_together(vote: Vote, out: Path, tmp_path: Path) -> None:
    first, again, file = vote("first.json", {0: "b"}, "one"), vote("again.json", {0: "a"}, "one"), tmp_path / "no.json"
    other = changed(vote("other.json", {0: "b"}, "two"), page="ffff")
    pages.write(tmp_path / "another.html", 1)
    for name, content in (("cut.json", "{"), ("list.json", "[]")):
        (tmp_path / name).write_text(content)
    for votes, key, says in (
        ([first, again], None, r"first\.json and .*again\.json are of the same judge"),
        ([first, other], None, r"other\.json holds votes of another page than .*first\.json: read them ap"),
        ([key_path(out)], None, "is the key of a page, not votes"),
        ([first], first, "is no key: `genrl compare` writes it beside the page"),
        ([first], key_path(tmp_path / "another.html"), "is the key of another page"),
        ([file], None, "cannot be read: No such file"),
        ([tmp_path / "cut.json"], None, "is not JSON"),
        ([tmp_path / "list.json"], None, "no"),
    ):
        with pytest.raises(ValueError, match=says):
            read(votes, key)


# -- Win rates, agreement and predictors against scipy, published values and what can be counted by hand
def test_win_rate_counts_ties_by_half_and_pairs_once() -> None:
    """Six pairs: B, B, B, A, tie, and one on which B, B and A were said."""
    actual = win_rate([[1], [1], [1], [0], [0.5], [1, 1, 0]])
    assert actual is not None and actual.value == pytest.approx((3 + 0.5 + 2 / 3) / 6) and actual.count == 6
    even = win_rate([[0.5]] * 10)
    wanted = binomtest(5, 10).proportion_ci(method="wilson")
    assert even is not None and (even.low, even.high) == pytest.approx((wanted.low, wanted.high))
    assert win_rate([]) is None
    for won, trials in ((0, 1), (1, 1), (3, 7), (250, 500)):
        actual, wanted = share(won, trials), binomtest(won, trials).proportion_ci(method="wilson")
        assert actual is not None and actual.value == won / trials and actual.count == trials
        assert (actual.low, actual.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_decided_leaves_out_overall_ties_and_same_answers_are_counted_by_pairs_of_judges() -> None:
    assert decided([[1], [0], [0.5], [1, 0], [1, 0.5], [0, 0.5, 0.5]]) == [True, False, True, False]
    assert same_answers([["left"], ["left", "left"], ["left", "tie", "left"]]) == (2, 4)
    result = accuracy([True, True, False, False], [0.3, -0.1, -2.0, 0.0])  # right, wrong, right, half
    assert result is not None and result.value == 2.5 / 4 and result.count == 4
    assert accuracy([], []) is None


def test_krippendorff_of_the_published_example() -> None:
    """Krippendorff 2011, section C: four observers, twelve units, nominal data: 0.743."""
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[row[k] for row in rows if row[k] is not None] for k in range(12)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)
