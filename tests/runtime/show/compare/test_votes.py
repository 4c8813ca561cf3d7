"""What votes say, resolved by the key; and what is said of files that cannot be read together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from genrl.runtime.show.compare.page import key_path
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
        answers = {
            tokens[k]: "tie" if choice == "tie" else pages.for_model(key, tokens[k], choice)
            for k, choice in choices.items()
        }
        return pages.votes(out, out.parent / name, answers, judge)

    return write


def test_counts_rates_and_categories(vote: Vote) -> None:
    """Of prompts 0 to 9, B wins the even ones, A wins 1 and 3, and 5, 7 and 9 are ties."""
    choices = {k: "b" if k % 2 == 0 else "a" if k < 4 else "tie" for k in range(10)}
    found = read([vote("votes.json", choices)])
    assert (found.a, found.b, found.judges, found.shown) == ("model-before", "model-after", 1, COUNT)
    assert (found.total.b, found.total.ties, found.total.a) == (5, 3, 2)
    assert found.total.rate.value == 6.5 / 10 and found.total.rate.count == 10
    wanted = binomtest(5, 7).proportion_ci(method="wilson")
    assert found.total.decided is not None and found.total.decided.value == 5 / 7
    assert (found.total.decided.low, found.total.decided.high) == pytest.approx((wanted.low, wanted.high))
    assert {name: (t.b, t.ties, t.a) for name, t in found.categories.items()} == {"even": (5, 0, 0), "odd": (0, 3, 2)}
    assert found.agreement is None


def test_which_reward_predicts_people(vote: Vote) -> None:
    """`good` prefers B, `bad` prefers A and did not score prompt 0, `equal` prefers none. Ties say nothing of them."""
    choices = {k: "b" for k in range(8)} | {8: "a", 9: "a", 10: "tie"}
    found = read([vote("votes.json", choices)]).rewards
    shares = {label: (p.accuracy.value, p.accuracy.count, p.equal) for label, p in found.items() if p.accuracy}
    assert shares == {"good": (0.8, 10, 0), "bad": (pytest.approx(2 / 9), 9, 0), "equal": (0.5, 10, 10)}


def test_several_judges(vote: Vote) -> None:
    first = vote("first.json", {0: "b", 1: "b", 2: "b", 3: "a"}, "one")
    second = vote("second.json", {0: "b", 1: "b", 2: "a", 4: "b"}, "two")
    found = read([first, second])
    assert found.judges == 2 and found.agreement is not None
    assert (found.agreement.pairs, found.agreement.same) == (3, pytest.approx(2 / 3))
    assert found.total.rate.count == 5
    assert found.total.rate.value == pytest.approx((1 + 1 + 0.5 + 0 + 1) / 5)
    assert (found.total.b, found.total.a) == (6, 2)


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


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"page": "ffff"}, "no key of the page"),
        ({"votes": {"ffff": "left"}}, "1 votes are of no pair of this page"),
        ({"votes": {"ffff": "up"}}, "'up' is no answer"),
        ({"votes": {"ffff": ["left"]}}, "is no answer"),
        ({"votes": {}}, "there are no votes in it"),
        *(({key: None}, "holds no votes: give the votes.json") for key in ("votes", "format", "judge")),
    ],
)
def test_votes_that_cannot_be_read(vote: Vote, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read([changed(vote("votes.json", {0: "b"}), **keys)])


def test_broken_files(tmp_path: Path) -> None:
    file = tmp_path / "votes.json"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read([file])
    for content, says in (("{", "is not JSON"), ("[]", "no")):
        file.write_text(content)
        with pytest.raises(ValueError, match=says):
            read([file])


def test_files_that_do_not_belong_together(vote: Vote, out: Path, tmp_path: Path) -> None:
    first = vote("first.json", {0: "b"}, "one")
    with pytest.raises(ValueError, match=r"first\.json and .*again\.json are of the same judge"):
        read([first, vote("again.json", {0: "a"}, "one")])
    with pytest.raises(ValueError, match=r"other\.json holds votes of another page than .*first\.json: read them ap"):
        read([first, changed(vote("other.json", {0: "b"}, "two"), page="ffff")])
    with pytest.raises(ValueError, match="is the key of a page, not votes"):
        read([key_path(out)])
    with pytest.raises(ValueError, match="is no key: `genrl compare` writes it beside the page"):
        read([first], first)
    pages.write(tmp_path / "another.html", 1)
    with pytest.raises(ValueError, match="is the key of another page"):
        read([first], key_path(tmp_path / "another.html"))
