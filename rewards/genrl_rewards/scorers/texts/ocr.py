"""Reward: is the text that the prompt asks for written in the picture?

That text is in double quotes in the prompt (`a sign that says "OPEN"`), or in a column of the prompt file. The lines
that were read are joined. Scores ignore case and spaces unless `fold` says otherwise.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

from genrl_rewards.contract import check_choice, declare
from genrl_rewards.pictures import to_uint8
from genrl_rewards.rows import NOTHING
from genrl_rewards.scorers.texts.expected import text_of
from genrl_rewards.scorers.texts.ocr_engines import PaddleReader, TesseractReader, TextReader
from genrl_rewards.scorers.texts.ocr_reader import Crop, Fold, Line, Reader

ALPHABET = string.ascii_letters + string.digits
OTHERS: dict[str, Callable[[], TextReader]] = {"tesseract": TesseractReader, "paddleocr": PaddleReader}
ENGINES = ("rapidocr", *OTHERS)


_QUOTED = re.compile(r'(?<!\d)"([^"]*)"|[“„”]([^“”„"]*)[“”]|[«»]([^«»]*)[«»]|「([^」]*)」|『([^』]*)』')


def quoted(prompt: str) -> str | None:
    """The text in a prompt's first double quotes, straight or typographic; None without any.

    No quote opens right behind a digit: in `a 12" record, "HELLO"` that is a mark of inches. One that is never closed
    goes to the end.
    """
    if match := _QUOTED.search(prompt):
        return next(text for text in match.groups() if text is not None)
    opened = re.search(r'(?<!\d)["“„«「](.*)', prompt, re.DOTALL)
    return opened[1] if opened else None


def normalise(text: str, fold: Fold = "case_space") -> str:
    """A text without the differences that `fold` names: of case, of spaces. Otherwise spaces are collapsed to one."""
    text = text.lower() if fold in ("case_space", "case") else text
    return text.replace(" ", "") if fold in ("case_space", "space") else " ".join(text.split())


def joined(lines: Sequence[str], fold: Fold = "case_space") -> str:
    """The lines as one folded text. If spaces count, a new line counts as one."""
    return normalise((" " if fold in ("case", "none") else "").join(lines), fold)


def exact(lines: Sequence[str], target: str, fold: Fold = "case_space") -> float:
    """1 if the lines, joined, are the target, otherwise 0."""
    return float(joined(lines, fold) == normalise(target, fold))


def contains(lines: Sequence[str], target: str, fold: Fold = "case_space") -> float | None:
    """1 if the target occurs anywhere in what was read, otherwise 0. None for an empty target.

    Repeating the word, or covering the picture with letters, scores 1.
    """
    target_text = normalise(target, fold)
    return float(target_text in joined(lines, fold)) if target_text else None


def ned_max(lines: Sequence[str], target: str, fold: Fold = "case_space") -> float:
    """1 - d / max(len(read), len(target)) with the edit distance d: 1 only for the target and nothing else."""
    read, target_text = joined(lines, fold), normalise(target, fold)
    return 1 - Levenshtein.distance(read, target_text) / max(len(read), len(target_text), 1)


def ned_partial(lines: Sequence[str], target: str, fold: Fold = "case_space") -> float | None:
    """1 - d / len(target) with the smallest edit distance d to any substring of what was read.

    Further text in the picture costs nothing (so a picture full of letters scores well). None for an empty target.
    """
    read, target_text = joined(lines, fold), normalise(target, fold)
    if not target_text:
        return None
    # Sellers' algorithm: row j of the edit-distance table, where a match may start anywhere at no cost.
    distances = list(range(len(target_text) + 1))
    best = distances[-1]
    for letter in read:
        previous, distances = distances, [0]
        for j, other in enumerate(target_text):
            distances.append(min(previous[j] + (letter != other), previous[j + 1] + 1, distances[j] + 1))
        best = min(best, distances[-1])
    return 1 - best / len(target_text)


def flow_grpo(lines: Sequence[str], target: str, fold: Fold = "case_space") -> float | None:
    """The Flow-GRPO authors' score: 1 if the target occurs in what was read, otherwise 1 - min(d, len) / len(target).

    Repeating the word, or covering the picture with letters, scores 1. None for an empty target.
    """
    read, target_text = joined(lines, fold), normalise(target, fold)
    if not target_text:
        return None
    if target_text in read:
        return 1.0
    return 1 - min(Levenshtein.distance(read, target_text), len(target_text)) / len(target_text)


def ctc(lines: Sequence[Line], target: str, fold: Fold = "case_space") -> float:
    """P(target)^(1 / len(target)): the mean probability per letter under the recogniser, in [0, 1].

    P sums over all alignments (connectionist temporal classification, Graves et al. 2006, eq. 3 and 8), so this rises
    before the first letter is read correctly, when scores by edit distance are still 0 for a whole group. The best of
    the single lines and all of them joined counts.
    """
    target_text = normalise(target, fold)
    if not lines or not target_text:
        return 0.0
    tables = [line.probabilities for line in lines]
    # Between lines, or the last letter of one and an equal first letter of the next would be read as one.
    blank = np.zeros((1, tables[0].shape[1]), np.float32)
    blank[0, 0] = 1
    together = np.concatenate([row for table in tables for row in (table, blank)])
    candidates = [together, *tables] if len(tables) > 1 else tables
    return max(_letter_probability(table, lines[0].symbols, target_text) for table in candidates)


def _letter_probability(table: np.ndarray, symbols: tuple[str, ...], wanted: str) -> float:
    columns = {symbol: 1 + i for i, symbol in enumerate(symbols)}
    if not set(wanted) <= set(columns):
        return 0.0  # a character that the recogniser does not know
    probabilities = torch.from_numpy(table)
    # Of what may be read at all: the masked characters have left a column's sum below 1.
    log_probs = (probabilities / probabilities.sum(1, keepdim=True)).clamp_min(1e-12).log()
    loss = torch.nn.functional.ctc_loss(
        log_probs[:, None],
        torch.tensor([[columns[letter] for letter in wanted]]),
        torch.tensor([len(table)]),
        torch.tensor([len(wanted)]),
        reduction="none",
    )
    # By letter, or long texts would have no score that a float can tell from 0.
    return math.exp(-loss.item() / len(wanted))


TextScore = Callable[[Sequence[str], str, Fold], float | None]
VARIANTS: dict[str, TextScore] = {
    "ned_max": ned_max,
    "exact": exact,
    "contains": contains,
    "ned_partial": ned_partial,
    "flow_grpo": flow_grpo,
}


class Ocr:
    """Is the quoted text of the prompt written in the picture? Read by RapidOCR on the CPU, in [0, 1].

    `variant`  `ned_max` (default), `exact`, `contains`, `ned_partial`, `flow_grpo`, or the dense `ctc`
    `crop`     `detect` finds text anywhere; `ink` is four times as fast, for one word on a small plain picture
    `alphabet` the characters that can be read in addition to those of the text, in either case; null for all
    `target`   `quotes`, or the column of the prompt file that holds the text
    `fold`     differences that do not count: `case_space` (default), `case`, `space`, `none`
    `engine`   `rapidocr` (default), `tesseract`, `paddleocr`; only the first has `crop`, `alphabet` and `ctc`

    No score for a prompt without quotes, or an empty text. A video gets the mean over its frames. The parts `exact`,
    `ned_max` and (with RapidOCR) `ctc` are always reported.
    """

    def __init__(
        self,
        variant: str = "ned_max",
        crop: Crop = "detect",
        alphabet: str | None = ALPHABET,
        target: str = "quotes",
        fold: Fold = "case_space",
        engine: str = "rapidocr",
    ):
        check_choice("ocr: unknown variant", variant, [*VARIANTS, "ctc"])
        check_choice("ocr: unknown crop", crop, get_args(Crop))
        check_choice("ocr: unknown fold", fold, get_args(Fold))
        check_choice("ocr: unknown engine", engine, ENGINES)
        if variant == "ctc" and engine != "rapidocr":
            raise ValueError(f"ocr: variant 'ctc' needs the probabilities that only 'rapidocr' gives, not {engine!r}")
        self.variant, self.alphabet, self.target, self.fold = variant, alphabet, target, fold
        self._parts = ("exact", "ned_max", "ctc") if engine == "rapidocr" else ("exact", "ned_max")
        self._reader = Reader(crop) if engine == "rapidocr" else OTHERS[engine]()
        self.__signature__ = declare(["images", "prompts" if target == "quotes" else target])

    def __call__(
        self, images: torch.Tensor, **asked: Sequence[str]
    ) -> tuple[list[float | None], dict[str, list[float | None]]]:
        (rows,) = asked.values()
        targets = [quoted(row) for row in rows] if self.target == "quotes" else [text_of(row) for row in rows]
        videos = images[:, None] if images.ndim == 4 else images
        scored = [self._video(to_uint8(video), target) for video, target in zip(videos, targets, strict=True)]
        values = [row[self.variant] for row in scored]
        return values, {part: [row[part] for row in scored] for part in self._parts}

    def read_row(self, **columns: Any) -> str:
        """Kind of text as which it reads what a row asks for."""
        value, expected = columns["prompts" if self.target == "quotes" else self.target], self.read_value(**columns)
        if expected is None or not normalise(expected):
            return NOTHING
        closed = self.target != "quotes" or _QUOTED.search(value)
        return "text" if closed else "text of a quote that is not closed"

    def read_value(self, **columns: Any) -> str | None:
        """The text that a row asks for."""
        return quoted(columns["prompts"]) if self.target == "quotes" else text_of(columns[self.target])

    def read(self, image: np.ndarray, target: str = "") -> list[Line]:
        """The lines of a picture, uint8 RGB [H, W, 3]; the characters of `target` can be read in any case.

        With engines other than RapidOCR the lines have no probabilities.
        """
        if isinstance(self._reader, Reader):
            return self._reader.lines(image, None if self.alphabet is None else self.alphabet + target, self.fold)
        return [Line(text, math.nan, (), np.zeros((0, 1), np.float32)) for text in self._reader.texts(image)]

    def _video(self, frames: np.ndarray, target: str | None) -> dict[str, float | None]:
        if target is None or not normalise(target):
            return dict.fromkeys([*VARIANTS, "ctc"])
        rows = [self._frame(frame, target) for frame in frames]
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def _frame(self, frame: np.ndarray, target: str) -> dict[str, float]:
        lines = self.read(frame, target)
        texts = [line.text for line in lines]
        scores = {name: variant(texts, target, self.fold) for name, variant in VARIANTS.items()}
        dense = {"ctc": ctc(lines, target, self.fold)} if isinstance(self._reader, Reader) else {}
        return {name: value for name, value in scores.items() if value is not None} | dense
