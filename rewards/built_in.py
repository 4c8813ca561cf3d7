"""The rewards of this package by name. What is here is read without importing any of them."""

from __future__ import annotations

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """A reward of this package: where it is, and what `genrl rewards` and messages say about it."""

    module: str
    attribute: str
    doc: str
    range: str
    extra: str = ""
    packages: tuple[str, ...] = ()
    """What the extra installs, by import name."""
    needs: str = ""
    """What it takes, where its signature does not say it (it depends on an argument)."""


BUILT_IN: dict[str, BuiltIn] = {
    "shapes": BuiltIn(
        module="rewards.shapes",
        attribute="Shapes",
        doc="count, colour, shape and position in the embedded world, by rules",
        range="0 to 1",
    ),
    "ocr": BuiltIn(
        module="rewards.ocr",
        attribute="Ocr",
        doc="is the quoted text of the prompt written in the image (RapidOCR)",
        range="0 to 1",
        extra="ocr",
        packages=("rapidocr", "onnxruntime", "cv2"),
        needs="images, prompts or a column",
    ),
    "clipscore": BuiltIn(
        module="rewards.clipscore",
        attribute="ClipScore",
        doc="cosine of CLIP's embeddings of image and prompt",
        range="-1 to 1, usually .1 to .4",
    ),
    "pickscore": BuiltIn(
        module="rewards.pickscore",
        attribute="PickScore",
        doc="human preference: PickScore v1 over 26",
        range="usually .6 to 1",
    ),
}
