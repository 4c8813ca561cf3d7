"""The page on which people judge two models blind, and the key that says which side was which.

The page holds no name, no score and nothing that depends on which model made a picture: every pair has an opaque token,
its order and its sides come from the operating system's randomness. The key, a file of its own, resolves the tokens. So
reading the source of the page does not help a judge, and nobody can compute the sides from `--seed`.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

from genrl.runtime.folder.run import write_atomic
from genrl.runtime.show.compare.media import MIME, SUFFIX, Media
from genrl.runtime.show.pages import render

KEY_FORMAT, VOTES_FORMAT = "genrl-compare-key-1", "genrl-compare-votes-1"
LARGEST_PAGE = 200_000_000
"""Bytes of a page with its pictures inside; browsers become slow above."""
MOST_PAIRS = 2_000
"""Of one page: about three hours of judging, at six seconds a pair."""
SECONDS_PER_PAIR = 6


@dataclass(frozen=True)
class Pair:
    """Samples of both models for one prompt, from the same noise."""

    prompt: str
    a: Media
    b: Media
    category: str | None = None
    """What the results are also listed by."""
    source: Media | None = None
    """The picture that both were given, of an editing model."""


def key_path(out: Path) -> Path:
    """File to which the key of a page is written: compare.key.json beside compare.html."""
    return out.with_name(f"{out.stem}.key.json")


def media_folder(out: Path) -> Path:
    """Folder of the pictures of a page, if they are not in it: compare_media beside compare.html."""
    return out.with_name(f"{out.stem}_media")


def check_new(out: Path) -> None:
    """Raise ValueError where there is a page already, whose votes could not be read without its key."""
    for path in (out, key_path(out), media_folder(out)):
        if path.exists():
            raise ValueError(
                f"{path} exists; votes on that page need its key. Give another --out, or delete {out.name}, "
                f"{key_path(out).name} and {media_folder(out).name}"
            )


def check_pairs(count: int) -> None:
    """Raise ValueError where nobody would judge so many pairs."""
    if count > MOST_PAIRS:
        hours = count * SECONDS_PER_PAIR / 3600
        raise ValueError(
            f"{count:,} pairs are about {hours:.0f} hours of judging at {SECONDS_PER_PAIR} seconds each; a page holds "
            f"at most {MOST_PAIRS:,}. Give --num-prompts 200, which takes that many evenly spread over the file"
        )


def estimated_bytes(first: Media, pairs: int, *, beside: bool) -> int:
    """Bytes of all samples of a page, if they are all like the first; inside the page they are written in base64."""
    size = 2 * pairs * len(first.data)
    return size if beside else size * 4 // 3


def check_size(first: Media, pairs: int, *, beside: bool) -> None:
    """Raise ValueError where the page would be too large for a browser."""
    size = estimated_bytes(first, pairs, beside=beside)
    if not beside and size > LARGEST_PAGE:
        fitting = max(1, pairs * LARGEST_PAGE // size)
        raise ValueError(
            f"the page would have about {size / 1e6:,.0f} MB: {pairs:,} pairs, of which the first sample has "
            f"{len(first.data) / 1e6:.2f} MB; a page has at most {LARGEST_PAGE // 10**6} MB. Give --num-prompts or "
            f"--per-prompt for at most {fitting:,} pairs, or --beside, which writes the samples into a folder beside "
            "the page"
        )


class Page:
    """A page in the making: `add` pairs, then `write`.

    beside: samples go into a folder beside the page, at once, instead of into the page.
    """

    def __init__(self, out: Path, *, question: str, beside: bool = False) -> None:
        """Raises ValueError where there is a page already."""
        check_new(out)
        self.out, self.question, self.beside = out, question, beside
        self.identical = 0
        """Pairs that are not shown, because both samples are the same to the byte."""
        self._random = SystemRandom()
        self._shown: list[dict[str, Any]] = []
        self._keys: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def add(self, pair: Pair) -> str | None:
        """Put a pair into the page, its sides at random; returns its token, None for one that is not shown because
        both samples are the same. Raises ValueError where the two give themselves away by their kind or size."""
        forms = [(m.kind, m.width, m.height) for m in (pair.a, pair.b)]
        if forms[0] != forms[1]:
            kinds = [f"{kind}s" + (f" of {width} x {height} pixels" if width else "") for kind, width, height in forms]
            raise ValueError(
                f"A makes {kinds[0]}, B {kinds[1]}: everybody would see which is which, and the noise is not the same. "
                "Give --height and --width"
            )
        if pair.a.data == pair.b.data:
            self.identical += 1
            return None
        token = secrets.token_hex(8)
        left = self._random.choice("ab")
        sides = (pair.a, pair.b) if left == "a" else (pair.b, pair.a)
        entry: dict[str, Any] = {"token": token, "prompt": pair.prompt}
        for name, media in zip(("left", "right", "source"), (*sides, pair.source), strict=True):
            if media is not None:
                shape = {"kind": media.kind, "width": media.width, "height": media.height}
                entry[name] = shape | {"url": self._url(media)}
        self._shown.append(entry)
        self._keys[token] = {"prompt": pair.prompt, "category": pair.category, "left": left, "rewards": {}}
        return token

    def add_scores(self, token: str, label: str, a: float | None, b: float | None) -> None:
        """Put a reward's scores of both samples of a pair into the key; None = no score."""
        self._keys[token]["rewards"][label] = [a, b]

    def write(self, models: Mapping[str, Any]) -> tuple[Path, Path]:
        """Write the page and its key, whose paths are returned. models: what the key says of both of them.

        Raises ValueError where there is nothing to judge.
        """
        if not self._shown:
            raise ValueError(
                f"A and B made the same samples, to the byte, for all {self.identical} prompts: there is nothing to "
                "judge. Is one of them the other's copy, or not trained yet?"
            )
        self._random.shuffle(self._shown)
        page = secrets.token_hex(8)
        data = {"page": page, "format": VOTES_FORMAT, "pairs": self._shown}
        tokens = sorted(self._keys)  # not in the order of the prompts
        key = {"format": KEY_FORMAT, "page": page, **models, "identical": self.identical}
        write_atomic(self.out, render("compare.html", {"question": self.question, "data": data}))
        write_atomic(key_path(self.out), json.dumps(key | {"pairs": {t: self._keys[t] for t in tokens}}, indent=1))
        return self.out, key_path(self.out)

    def _url(self, media: Media) -> str:
        if not self.beside:
            return f"data:{MIME[media.kind]};base64,{base64.b64encode(media.data).decode()}"
        folder = media_folder(self.out)
        name = f"{secrets.token_hex(8)}{SUFFIX[media.kind]}"
        write_atomic(folder / name, media.data)
        return f"{folder.name}/{name}"
