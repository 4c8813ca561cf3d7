"""Make assets/references: for every training prompt of shapes some drawn pictures, the positives of Adv-GRPO.

python assets/build_references.py assets/references [pictures per prompt [shape of all things]]

With a shape they are of another style: `... assets/references_round 1 circle`.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from genrl.data.prompts import load
from genrl.playground import shapes as world
from genrl_rewards.scorers.objects.shapes import parse

SEED = 0


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png", optimize=True)
    return file.getvalue()


def main(out: Path, pictures: int, shape: str | None) -> None:
    rows: list[dict[str, object]] = []
    for number, prompt in enumerate(load("assets/prompts/shapes_train.txt")):
        asked = parse(prompt.text)
        assert asked is not None, prompt.text
        rng = np.random.default_rng([SEED, number])
        for _ in range(pictures):
            things = world.place(rng, asked.groups, asked.relation)
            if shape is not None:
                things = tuple(replace(thing, shape=shape) for thing in things)
            scene = world.Scene("single", things, asked.groups, asked.relation)
            rows.append({"prompt": prompt.text, "image": {"bytes": png(world.draw(scene)), "path": None}})
    columns = {"prompt": datasets.Value("string"), "image": datasets.Image()}
    out.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows, features=datasets.Features(columns)).to_parquet(out / "train.parquet")
    print(f"{len(rows)} pictures")


if __name__ == "__main__":
    out, *given = sys.argv[1:]
    main(Path(out), int(given[0]) if given else 4, given[1] if len(given) > 1 else None)
