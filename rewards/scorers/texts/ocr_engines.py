"""Second opinions for the OCR reward: Tesseract and PaddleOCR. Both only say what they read, without probabilities.

Engines fail on different pictures. A policy that has learnt to please one is seldom read by the other, which makes
another engine with weight 0 a good monitor.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import numpy as np
from PIL import Image

SMALL = 400  # pixels; pictures with a shorter side are doubled for Tesseract, which was made for scanned pages
TIMEOUT = 60  # seconds for one picture
MIN_CONFIDENCE = 0.5


class TesseractReader:
    """Tesseract 4 or later (`tesseract` on the PATH) through pytesseract; a process for every picture.

    Page segmentation 11, sparse text: the modes for a single word or line misread short words on clean pictures.
    """

    def __init__(self) -> None:
        _require("pytesseract", "tesseract")
        if shutil.which("tesseract") is None:
            raise ValueError("ocr: the program 'tesseract' is not on the PATH: apt install tesseract-ocr, or the like")

    def texts(self, image: np.ndarray) -> list[str]:
        """The lines of a picture (uint8 RGB [H, W, 3]), in Tesseract's order; [] if there are none."""
        import pytesseract

        picture = Image.fromarray(image)
        if min(picture.size) < SMALL:
            picture = picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.BICUBIC)
        read = pytesseract.image_to_string(picture, config="--psm 11", timeout=TIMEOUT)
        return [line.strip() for line in read.splitlines() if line.strip()]


class PaddleReader:
    """PaddleOCR 3 on the CPU, English and numbers; it downloads its models at first use."""

    def __init__(self) -> None:
        _require("paddleocr", "paddle")
        import paddleocr

        self._engine: Any = paddleocr.PaddleOCR(
            lang="en",
            device="cpu",
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
        )

    def texts(self, image: np.ndarray) -> list[str]:
        """The lines of a picture (uint8 RGB [H, W, 3]) with a confidence of at least .5, in PaddleOCR's order."""
        results = self._engine.predict(np.ascontiguousarray(image[..., ::-1]))  # it takes blue first
        lines = [row for result in results for row in zip(result["rec_texts"], result["rec_scores"], strict=True)]
        return [text for text, confidence in lines if confidence >= MIN_CONFIDENCE]


def _require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"ocr: the engine needs {package!r}, which is not installed here: pip install 'genrl[{extra}]'"
        )
