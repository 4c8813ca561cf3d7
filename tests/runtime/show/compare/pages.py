"""Pages of which every answer is known: A is red, B is blue."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from genrl.runtime.show.compare.page import Media, Page, Pair, encode

MODELS = {"a": {"name": "model-before"}, "b": {"name": "model-after"}, "prompts": "some.txt", "seed": 0}


def tile(colour: str, shade: int) -> Media:
    """A picture of 8 x 8 pixels."""
    picture = torch.zeros(3, 8, 8)
    picture[("red", "blue").index(colour) * 2] = (128 + shade) / 255
    return encode(picture)


def write(out: Path, count: int, **options: Any) -> Page:
    """A page of `count` pairs with scores: `good` prefers B, `bad` prefers A, `even` scores both equally."""
    page = Page(out, question="Which one do you prefer?", **options)
    for k in range(count):
        token = page.add(Pair(f"prompt {k}", tile("red", k), tile("blue", k), "even" if k % 2 == 0 else "odd"))
        assert token is not None
        page.add_scores(token, "good", 0.0, 1.0)
        page.add_scores(token, "bad", 1.0, None if k == 0 else 0.0)
        page.add_scores(token, "equal", 1.0, 1.0)
    page.write(MODELS)
    return page


def data(out: Path) -> Any:
    """What the page holds for its script."""
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', out.read_text(), re.DOTALL)
    assert result is not None
    return json.loads(result[1])


def content(url: str, folder: Path) -> bytes:
    """The file that a page shows, within it or beside it."""
    return base64.b64decode(url.split(",", 1)[1]) if url.startswith("data:") else (folder / url).read_bytes()


def picture(url: str, folder: Path) -> np.ndarray:
    """The pixels that a page shows, uint8 [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(content(url, folder))).convert("RGB"))


def votes(out: Path, file: Path, answers: dict[str, str], judge: str = "one") -> Path:
    """A file of votes as the page downloads it. answers: token -> "left", "right", "tie"."""
    shown = data(out)
    file.write_text(json.dumps({"format": shown["format"], "page": shown["page"], "judge": judge, "votes": answers}))
    return file


def for_model(key: dict[str, Any], token: str, model: str) -> str:
    """The side on which this model ("a", "b") stands."""
    return "left" if key["pairs"][token]["left"] == model else "right"
