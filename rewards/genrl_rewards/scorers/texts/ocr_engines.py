"""Second opinions for the OCR reward: Tesseract and PaddleOCR. Both only return what they read, without probabilities.

Engines fail on different pictures. What a policy has learnt to make one engine read, another one seldom reads, so an
additional engine with weight 0 is a good monitor.
"""

from __future__ import annotations

import shutil
from typing import Any, Protocol

import numpy as np
from PIL import Image

from genrl_rewards.extras import install
from genrl_rewards.loading import missing_packages

SMALL = 400  # pixels; pictures whose shorter side has fewer are doubled for Tesseract, which was made for scanned pages
TIMEOUT = 60  # seconds for one picture
MIN_CONFIDENCE = 0.5


class TextReader(Protocol):
    """An engine that returns what it reads, without probabilities."""

    def texts(self, image: np.ndarray) -> list[str]:
        """The lines of a picture (uint8 RGB [H, W, 3]), in the engine's order; [] if there are none."""


class TesseractReader:
    """Tesseract 4 or later (`tesseract` on the PATH) through pytesseract; it starts a process for every picture.

    Page segmentation mode 11, sparse text: those for a single word or line misread short words on clean pictures.
    """

    def __init__(self) -> None:
        _require("pytesseract", "tesseract")
        if shutil.which("tesseract") is None:
            raise ValueError("ocr: the program 'tesseract' is not on the PATH: apt install tesseract-ocr, or the like")

    def texts(self, image: np.ndarray) -> list[str]:
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
        """The lines with a confidence of at least .5."""
        results = self._engine.predict(np.ascontiguousarray(image[..., ::-1]))  # its channel order is BGR
        lines = [row for result in results for row in zip(result["rec_texts"], result["rec_scores"], strict=True)]
        return [text for text, confidence in lines if confidence >= MIN_CONFIDENCE]


def _require(package: str, extra: str) -> None:
    if missing_packages((package,)):
        raise ValueError(f"ocr: the engine needs {package!r}, which is not installed here: {install(extra)}")
