"""Reads the text in a picture: RapidOCR's detector and recogniser (PP-OCR, ONNX) on the CPU, one thread.

For each column of a text line, the recogniser gives a distribution over characters. Three things are done with it
before it is read. Characters outside the alphabet are masked, since texture is easily read as some rare character
(smooth noise as Chinese, a stroke as a dash). If case is ignored, upper and lower case are added, since a letter
between the two would be read twice. If spaces are ignored, a space counts as the blank between letters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from genrl_rewards.extras import install

Crop = Literal["detect", "ink"]
Fold = Literal["case_space", "case", "space", "none"]

LINE_HEIGHT = 48  # pixels; the recogniser was made for it
MIN_WIDTH = 16
DETECTION_SIDE = 256  # pixels; smaller pictures are enlarged to it. The library's 736 takes eight times as long
MIN_CONFIDENCE = 0.5  # of a detected line, as in the library: with less it is texture rather than text
BLANK = 0


class Line(NamedTuple):
    """A line of text as it was read (folded), and for T columns of the picture the `probabilities` [T, 1 + S] of a
    blank (column 0) and of the S `symbols`."""

    text: str
    confidence: float
    symbols: tuple[str, ...]
    probabilities: np.ndarray


class Reader:
    """A detector and a recogniser. Do not use one from several threads at once.

    `crop="detect"` finds the lines of text anywhere in a picture of any size (about 18 ms at 64 pixels, 80 ms at 512).
    `crop="ink"` assumes that the part that differs from the picture's border is a single line (about 5 ms at 64
    pixels): right for a small picture of one word on a plain background, and wrong for anything else.
    """

    def __init__(self, crop: Crop = "detect"):
        import onnxruntime
        import rapidocr

        folder = Path(rapidocr.__file__).parent / "models"
        models = sorted(folder.glob("*_rec_*.onnx"))
        if len(models) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise ValueError(
                f"rapidocr should ship one recogniser in {folder}; found {names}: {install('ocr')} --upgrade"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # Waiting threads would spin on the cores that draw the next samples.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(models[0], options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        listed = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ("", *listed, " ")
        self._detector = None if crop == "ink" else _detector()

    def lines(self, image: np.ndarray, alphabet: str | None, fold: Fold = "case_space") -> list[Line]:
        """The lines of a picture (uint8 RGB [H, W, 3]) from top to bottom, left to right; [] if there are none.

        `alphabet` holds the characters that can be read (in either case); None: all 18,000 that are known.
        `fold` says which differences are ignored: of case, of spaces.
        """
        if self._detector is None:
            part = ink_crop(image)
            return [] if part is None else [self._recognise(part, alphabet, fold)]
        bgr = np.ascontiguousarray(image[..., ::-1])
        # The engine keeps these flags from call to call, so all of them are given in each.
        boxes = self._detector(bgr, use_det=True, use_cls=False, use_rec=False).boxes
        lines = [self._recognise(straighten(image, box), alphabet, fold) for box in ([] if boxes is None else boxes)]
        return [line for line in lines if line.confidence >= MIN_CONFIDENCE]

    def _recognise(self, part: np.ndarray, alphabet: str | None, fold: Fold) -> Line:
        import cv2

        height, width = part.shape[:2]
        width = max(MIN_WIDTH, round(LINE_HEIGHT * width / height))
        # PP-OCR was trained on OpenCV's order of channels.
        bgr = np.ascontiguousarray(part[..., ::-1])
        pixels = cv2.resize(bgr, (width, LINE_HEIGHT)).astype(np.float32) / 127.5 - 1
        output = self._session.run(None, {self._input: pixels.transpose(2, 0, 1)[None]})[0][0]
        symbols, classes, columns = _columns(self._characters, alphabet, fold)
        probabilities = np.zeros((len(output), 1 + len(symbols)), np.float32)
        np.add.at(probabilities.T, columns, output[:, classes].T)
        best = probabilities.argmax(1)
        is_new = (best != BLANK) & np.concatenate([[True], best[1:] != best[:-1]])
        confidence = float(probabilities.max(1)[is_new].mean()) if is_new.any() else 0.0
        return Line("".join(symbols[i - 1] for i in best[is_new]), confidence, symbols, probabilities)


@lru_cache(maxsize=256)
def _columns(
    characters: tuple[str, ...], alphabet: str | None, fold: Fold
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """The symbols that can be read, the model's classes that are used, and the column each is added to."""
    allowed = None if alphabet is None else set(alphabet.lower())
    columns: dict[str, int] = {}
    pairs = [(0, BLANK)]
    for index, character in enumerate(characters[1:-1], start=1):
        symbol = character.lower() if fold in ("case_space", "case") else character
        if allowed is None or symbol.lower() in allowed:
            pairs.append((index, columns.setdefault(symbol, 1 + len(columns))))
    space = BLANK if fold in ("case_space", "space") else columns.setdefault(" ", 1 + len(columns))
    pairs.append((len(characters) - 1, space))
    classes, targets = np.array(pairs).T
    return tuple(columns), classes, targets


def _detector() -> Any:
    from rapidocr import RapidOCR

    logging.getLogger("RapidOCR").setLevel(logging.ERROR)
    return RapidOCR(
        params={
            "Global.log_level": "error",
            "Det.limit_side_len": DETECTION_SIDE,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


def ink_crop(image: np.ndarray) -> np.ndarray | None:
    """The part of a picture (uint8 [H, W, 3]) that differs from the median colour of its border; None if nothing does.

    It must differ by more than 40 levels (Euclidean, after a 3 x 3 mean) and more than .35 of the largest difference.
    A margin of a quarter of the part's height is added on each side.
    """
    import cv2

    pixels = image.astype(np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    distance = np.linalg.norm(cv2.blur(pixels, (3, 3)) - np.median(border, axis=0), axis=-1)
    ink = distance > max(40.0, 0.35 * float(distance.max()))
    if not ink.any():
        return None
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    margin = round(0.25 * (rows[-1] - rows[0] + 1))
    top, left = max(0, rows[0] - margin), max(0, columns[0] - margin)
    return image[top : rows[-1] + margin + 1, left : columns[-1] + margin + 1]


def straighten(image: np.ndarray, box: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Cut a quadrilateral (corners [4, 2] in pixels, clockwise from the upper left) out of a picture, as a rectangle.

    One at least 1.5 times as high as wide is assumed to be vertical writing and turned to the left.
    """
    import cv2

    corners = np.asarray(box, dtype=np.float32)
    width, height = (
        max(1, int(max(np.linalg.norm(corners[a] - corners[b]), np.linalg.norm(corners[c] - corners[d]))))
        for a, b, c, d in ((0, 1, 2, 3), (0, 3, 1, 2))
    )
    flat = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float32)
    warp = cv2.getPerspectiveTransform(corners, flat)
    size = (width, height)
    part = cv2.warpPerspective(image, warp, size, borderMode=cv2.BORDER_REPLICATE, flags=cv2.INTER_CUBIC)
    return np.rot90(part) if height >= 1.5 * width else part
