"""How often, and how fast, the OCR reward reads drawn words: the table of docs/rewards.md.

    python -m benchmarks.ocr_accuracy [--engine tesseract] [a second .ttf font]

RapidOCR with both of its crops, or another engine. The milliseconds of Tesseract are of its own process. Writes
ocr_accuracy.json.
"""

from __future__ import annotations

import os
import string

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from benchmarks.common import parser, save
from genrl.playground import shapes as world
from genrl_rewards.scorers.texts.ocr import ALPHABET, ENGINES, Ocr, exact, quoted
from genrl_rewards.scorers.texts.ocr_reader import Crop

WORDS = """CAT DOG SUN OPEN EXIT TAXI KITE IRON QUIZ JAZZ ZERO MOON BREAD LIGHT OLIVE PIANO FOX ZOO OIL SHIP CAFE HOTEL
KEY MILK""".split()
CONDITIONS = {"clean": (0, 0), "noise .05": (0.05, 0), "noise .1": (0.1, 0), "blur 1": (0, 1), "both": (0.05, 1)}


def draw(word: str, font: str | None, share: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """A word over `share` of the width of a square picture, somewhere, in random dark and light colours."""
    load = (lambda px: ImageFont.load_default(px)) if font is None else (lambda px: ImageFont.truetype(font, px))
    side = 4 * size
    dark, light = (tuple(map(int, rng.integers(low, low + 90, 3))) for low in (0, 165))
    ground, ink = (dark, light) if rng.random() < 0.5 else (light, dark)
    left, top, right, bottom = load(100).getbbox(word)
    pixels = 100 * min(share * side / (right - left), 0.8 * side / (bottom - top))
    left, top, right, bottom = load(pixels).getbbox(word)
    free = 0.03 * side, 0.94 * side
    x, y = free[0] + rng.uniform(size=2) * (free[1] - np.array([right - left, bottom - top])).clip(0)
    picture = Image.new("RGB", (side, side), ground)
    ImageDraw.Draw(picture).text((x - left, y - top), word, font=load(pixels), fill=ink)
    return np.asarray(picture.resize((size, size), Image.Resampling.BOX))


def spoil(image: np.ndarray, noise: float, blur: float, rng: np.random.Generator) -> np.ndarray:
    if blur:
        image = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(blur)))
    return (image + rng.normal(0, 255 * noise, image.shape)).clip(0, 255).round().astype(np.uint8)


def pictures(kind: str, fonts: list[str | None], size: int) -> list[tuple[np.ndarray, str]]:
    rng = np.random.default_rng(0)
    if kind == "signs":
        scenes = [world.sample_scene(rng, "word", ("train", "eval")[i % 2]) for i in range(400)]
        return [(world.draw(scene, size), quoted(world.caption(scene)) or "") for scene in scenes]
    share = {"fill": 0.8, "half": 0.45}[kind]
    words = [*WORDS, *(word.lower() for word in WORDS)]
    return [(draw(word, font, share, size, rng), word) for font in fonts for word in words]


def cost() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", default="rapidocr", choices=ENGINES)
    arguments.add_argument("fonts", nargs="*")
    given = arguments.parse_args()
    fonts: list[str | None] = [None, *given.fonts]
    results = []
    capitals = string.ascii_uppercase
    settings = [("signs", 64, capitals)] + [(kind, size, None) for size in (64, 128) for kind in ("fill", "half")]
    print(f"| pictures | engine | {' | '.join(CONDITIONS)} | ms |\n|---|---|{'---|' * (len(CONDITIONS) + 1)}")
    for kind, size, alphabet in settings:
        rows = pictures(kind, fonts, size)
        if given.engine != "rapidocr":
            rows = rows[:: len(rows) // 48]  # a process for every picture is slow
        crops: tuple[Crop, ...] = ("ink", "detect") if given.engine == "rapidocr" else ("detect",)
        for crop in crops:
            reward = Ocr(crop=crop, alphabet=alphabet or ALPHABET, engine=given.engine)
            right, start = [], cost()
            for noise, blur in CONDITIONS.values():
                rng = np.random.default_rng(1)
                texts = [[line.text for line in reward.read(spoil(im, noise, blur, rng))] for im, _ in rows]
                right.append(float(np.mean([exact(t, word) for t, (_, word) in zip(texts, rows, strict=True)])))
            spent = 1000 * (cost() - start) / len(rows) / len(CONDITIONS)
            cells = " | ".join(f"{r:.3f}" for r in right)
            name = f"`{crop}`" if given.engine == "rapidocr" else f"{given.engine}, {len(rows)} pictures"
            print(f"| {kind}, {size} px | {name} | {cells} | {spent:.0f} |", flush=True)
            results.append({"pictures": kind, "pixels": size, "engine": name, "right": right, "ms": spent})
    save(given.out, "ocr_accuracy", results)


if __name__ == "__main__":
    main()
