"""Prompt files that runs need and that are not in assets: written into the folder of the runs, always the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from genrl.playground.shapes import caption, sample_scene
from genrl.runtime.folder.run import write_atomic

ASSETS = Path("assets/prompts")


def captions() -> str:
    """10,000 different captions of the world, 1,390 of shapes (there are no more) and 8,610 of signs."""
    rng, texts = np.random.default_rng(0), dict[str, None]()
    while len(texts) < 10_000:
        texts[caption(sample_scene(rng))] = None
    return "".join(f"{text}\n" for text in texts)


def mixed(split: str) -> str:
    """The paraphrases of a split, every other one as the caption that it stands for."""
    rows = [json.loads(line) for line in (ASSETS / f"paraphrases_{split}.jsonl").read_text().splitlines()]
    both = [row | {"prompt": row["caption"]} if k % 2 else row for k, row in enumerate(rows)]
    return "".join(json.dumps(row) + "\n" for row in both)


def taught(split: str) -> str:
    """Captions of shapes and of signs by turns, each with the teacher that knows its kind."""
    kinds = ((name, (ASSETS / f"{name}_{split}.txt").read_text().splitlines()) for name in ("shapes", "words"))
    rows = [[{"prompt": text, "teacher": name} for text in texts] for name, texts in kinds]
    return "".join(json.dumps(row) + "\n" for pair in zip(*rows, strict=False) for row in pair)


FILES: dict[str, Callable[[], str]] = {
    "captions.txt": captions,
    "mixed_train.jsonl": lambda: mixed("train"),
    "mixed_eval.jsonl": lambda: mixed("eval"),
    "taught_train.jsonl": lambda: taught("train"),
    "taught_eval.jsonl": lambda: taught("eval"),
}


def written(name: str, folder: Path) -> Path:
    """The file of this name, made where it is not there."""
    file = folder.resolve() / "files" / name
    if not file.exists():
        write_atomic(file, FILES[name]())
    return file
