"""`genrl compare --read`: the votes of one page, resolved by its key."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from genrl.runtime.show.compare.page import KEY_FORMAT, VOTES_FORMAT
from genrl.runtime.show.compare.statistics import (
    Share,
    accuracy,
    decided,
    krippendorff_alpha,
    same_answers,
    share,
    win_rate,
)

ANSWERS = ("left", "right", "tie")


@dataclass(frozen=True)
class Tally:
    """The votes on some pairs."""

    b: int
    """Votes for B."""
    a: int
    ties: int
    rate: Share
    """Win rate of B over A, ties by half; trials are pairs."""
    decided: Share | None
    """Share of the pairs without an overall tie on which B won."""


@dataclass(frozen=True)
class Agreement:
    """How far judges agree who judged the same pairs."""

    pairs: int
    """Pairs with more than one judge."""
    same: float
    """Share of the pairs of judges who gave the same answer."""
    alpha: float | None
    """Krippendorff's alpha: 1 = all agree, 0 = as by chance."""


@dataclass(frozen=True)
class Predictor:
    """How well a reward predicts people: the pairs that they decided and of which it scored both samples."""

    accuracy: Share | None
    equal: int
    """Of these pairs, those that it scored equally; each counts as half right."""


@dataclass(frozen=True)
class Reading:
    """What people said of two models."""

    a: str
    b: str
    judges: int
    shown: int
    """Pairs of the page."""
    identical: int
    """Prompts for which both made the same sample, which nobody was shown."""
    total: Tally
    categories: Mapping[str, Tally]
    left: Share | None
    """Share of the votes other than ties that went to the left side: far from a half, judges did not look."""
    agreement: Agreement | None
    """None where no pair has two judges."""
    rewards: Mapping[str, Predictor]


def read(files: Sequence[Path], key: Path | None = None) -> Reading:
    """What the votes of one or several judges say.

    key: the page's; None = it is looked for beside the votes and in the current folder. Raises ValueError for files
    that are no votes, of different pages, of the same judge twice, or of a page without its key.
    """
    votes = [_votes(file) for file in files]
    for file, record in zip(files, votes, strict=True):
        if record["page"] != votes[0]["page"]:
            raise ValueError(f"{file} holds votes of another page than {files[0]}: read them apart, each with its key")
    judges = [record["judge"] for record in votes]
    for k, judge in enumerate(judges):
        if judge in judges[:k]:
            raise ValueError(
                f"{files[judges.index(judge)]} and {files[k]} are of the same judge, in the same browser: give only "
                "the newer one"
            )
    pairs_key = _key(files, votes[0]["page"], key)
    pairs: dict[str, Any] = pairs_key["pairs"]
    for file, record in zip(files, votes, strict=True):
        if strange := record["votes"].keys() - pairs.keys():
            raise ValueError(f"{file}: {len(strange)} votes are of no pair of this page; download the votes again")
    answers = {token: [r["votes"][token] for r in votes if token in r["votes"]] for token in pairs}
    return reading(pairs_key, {token: by_judge for token, by_judge in answers.items() if by_judge}, len(judges))


def reading(key: Mapping[str, Any], answers: Mapping[str, Sequence[str]], judges: int = 1) -> Reading:
    """key: as `page.Page.write` has it. answers: token -> "left", "right" or "tie" of each judge who judged that pair.

    Raises ValueError where there are no votes.
    """
    if not answers:
        raise ValueError("there are no votes in it: judge some pairs before you download them")
    pairs = key["pairs"]
    votes = {
        token: [_for_b(answer, pairs[token]["left"]) for answer in by_judge] for token, by_judge in answers.items()
    }
    groups: dict[str, list[list[float]]] = {}
    for token, values in votes.items():
        if pairs[token]["category"] is not None:
            groups.setdefault(str(pairs[token]["category"]), []).append(values)
    sides = Counter(answer for by_judge in answers.values() for answer in by_judge)
    same, compared = same_answers(list(answers.values()))
    agreement = Agreement(
        sum(len(by_judge) > 1 for by_judge in answers.values()),
        same / max(compared, 1),
        krippendorff_alpha(list(answers.values())),
    )
    labels = sorted({label for pair in pairs.values() for label in pair["rewards"]})
    return Reading(
        key["a"]["name"],
        key["b"]["name"],
        judges,
        len(pairs),
        key["identical"],
        tally(list(votes.values())),
        {name: tally(groups[name]) for name in sorted(groups)},
        share(sides["left"], sides["left"] + sides["right"]),
        agreement if compared else None,
        {label: _predictor(label, pairs, votes) for label in labels},
    )


def tally(votes: Sequence[Sequence[float]]) -> Tally:
    """votes: of each pair, of which there is one at least, those of its judges: 1 = B, 0 = A, 0.5 = tie."""
    counts = Counter(value for of_pair in votes for value in of_pair)
    won, rate = decided(votes), win_rate(votes)
    assert rate is not None
    return Tally(counts[1.0], counts[0.0], counts[0.5], rate, share(sum(won), len(won)))


def _predictor(label: str, pairs: Mapping[str, Any], votes: Mapping[str, Sequence[float]]) -> Predictor:
    preferred, advantages = [], []
    for token, values in votes.items():
        a, b = pairs[token]["rewards"].get(label, (None, None))
        if a is not None and b is not None and math.isfinite(b - a) and fmean(values) != 0.5:
            preferred.append(fmean(values) > 0.5)
            advantages.append(b - a)
    return Predictor(accuracy(preferred, advantages), sum(d == 0 for d in advantages))


def _for_b(answer: str, left: str) -> float:
    if answer == "tie":
        return 0.5
    return float((answer == "left") == (left == "b"))


def _votes(file: Path) -> dict[str, Any]:
    record = _json(file)
    if record.get("format") == KEY_FORMAT:
        raise ValueError(f"{file} is the key of a page, not votes: give it as --key, and votes.json to --read")
    votes = record.get("votes")
    texts = isinstance(record.get("page"), str) and isinstance(record.get("judge"), str)
    if record.get("format") != VOTES_FORMAT or not texts or not isinstance(votes, dict):
        raise ValueError(f"{file} holds no votes: give the votes.json that the page of `genrl compare` downloads")
    for answer in votes.values():
        if answer not in ANSWERS:
            raise ValueError(f"{file}: {answer!r} is no answer ({', '.join(ANSWERS)}); download the votes again")
    return record


def _key(files: Sequence[Path], page: str, key: Path | None) -> dict[str, Any]:
    if key is not None:
        record = _json(key)
        if record.get("format") != KEY_FORMAT:
            raise ValueError(f"{key} is no key: `genrl compare` writes it beside the page, as compare.key.json")
        if record["page"] != page:
            raise ValueError(f"{key} is the key of another page than {files[0]} is of; give the one beside that page")
        return record
    folders = dict.fromkeys([*(file.parent.resolve() for file in files), Path.cwd()])
    for path in (path for folder in folders for path in sorted(folder.glob("*.key.json"))):
        record = _json(path)
        if record.get("format") == KEY_FORMAT and record.get("page") == page:
            return record
    looked = " and ".join(map(str, folders))
    raise ValueError(
        f"no key of the page that {files[0]} is of in {looked}: give --key FILE, which `genrl compare` wrote beside "
        "the page (compare.key.json); without it nobody can tell which side was which"
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): is it cut off? Download it again") from error
    return record if isinstance(record, dict) else {}
