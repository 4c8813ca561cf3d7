"""Held-out scores of the embedded models at several settings, and a grid of pictures for each setting.

    python assets/score_tiny_models.py --out build/tiny-models/grids

Picture i of a prompt file starts from the noise of seed i. Needs the `ocr` extra. Printed per setting: shapes soft /
strict (strict by kind), words by edit distance / exactly right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from genrl.playground import shapes as world
from genrl_rewards.contract import to_uint8
from genrl_rewards.scorers.objects.shapes import Shapes, parse
from genrl_rewards.scorers.texts.ocr import Ocr

ASSETS = Path(__file__).resolve().parent
# guidance, steps, length of the silent third text encoder (tiny-t2i only)
SETTINGS = {
    "tiny-t2i": [(1.0, 8, 2), (2.0, 8, 2), (4.0, 8, 2), (1.0, 20, 2), (4.0, 20, 2)]
    + [(1.0, 8, 16), (1.0, 8, 256), (4.0, 8, 256)],
    "tiny-sd": [(1.0, 8, 0), (2.0, 8, 0), (4.0, 8, 0), (4.0, 20, 0)],
}


def score(pipeline: DiffusionPipeline, call: dict[str, float], grid_file: Path) -> str:
    shapes, words = world.shapes_prompts("eval"), world.words_prompts("eval")
    started = time.process_time()
    pictures = {"shapes": sample(pipeline, shapes, call), "words": sample(pipeline, words, call)}
    seconds = (time.process_time() - started) / (len(shapes) + len(words))
    _, parts = Shapes()(pictures["shapes"], shapes)
    read, read_parts = Ocr(crop="ink")(images=pictures["words"], prompts=words)
    strict: dict[str, list[float]] = {kind: [] for kind in world.SHAPE_KINDS}
    for prompt, value in zip(shapes, parts["strict"], strict=True):
        strict[kind_of(prompt)].append(value)
    kinds = " ".join(f"{kind} {np.mean(values):.2f}" for kind, values in strict.items())
    soft_words, exact = np.mean([v or 0.0 for v in read]), np.mean([v or 0.0 for v in read_parts["exact"]])
    tiles = torch.cat([pictures["shapes"][:50], pictures["words"][:20]])
    rows = [torch.cat(list(F.pad(row, (1, 1, 1, 1), value=0.8)), dim=2) for row in tiles.split(10)]
    Image.fromarray(to_uint8(torch.cat(rows, dim=1))).save(grid_file)
    return (
        f"shapes {np.mean(parts['soft']):.2f} / {np.mean(parts['strict']):.2f} ({kinds}), "
        f"words {soft_words:.2f} / {exact:.2f}, {1000 * seconds:.0f} ms a picture"
    )


def sample(pipeline: DiffusionPipeline, prompts: list[str], call: dict[str, float]) -> Tensor:
    pictures = []
    for first in range(0, len(prompts), 32):
        chunk = prompts[first : first + 32]
        generators = [torch.Generator().manual_seed(first + i) for i in range(len(chunk))]
        pictures.append(pipeline(chunk, generator=generators, output_type="pt", **call).images.float())
    return torch.cat(pictures)


def kind_of(prompt: str) -> world.Kind:
    asked = parse(prompt)
    assert asked is not None
    if asked.relation:
        return "position"
    several = any(group.count > 1 for group in asked.groups)
    if len(asked.groups) == 1:
        return "count" if several else "single"
    return "mixed" if several else "two"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", help="a pipeline folder; default: both of assets/")
    parser.add_argument("--out", type=Path, default=Path("build/tiny-models/grids"), help="where the grids go")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for folder in args.model or [ASSETS / name for name in SETTINGS]:
        pipeline = DiffusionPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        name = "tiny-t2i" if "transformer" in pipeline.components else "tiny-sd"
        for guidance, steps, blank in SETTINGS[name]:
            call = {"guidance_scale": guidance, "num_inference_steps": steps}
            if blank:
                call["max_sequence_length"] = blank
            grid = args.out / f"{name}-{guidance}-{steps}-{blank}.png"
            print(f"{name} {call}\n    {score(pipeline, call, grid)}", flush=True)


if __name__ == "__main__":
    main()
