"""Make assets/preferences: for every training prompt the best and the worst of some samples of the embedded model.

python assets/build_preferences.py assets/preferences [samples per prompt]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image

import genrl_rewards
from genrl.data.prompts import load
from genrl_rewards.models.torchvision_compat import ensure

ensure()

from diffusers import DiffusionPipeline  # noqa: E402

from genrl.diffusion.policy.policy import Policy  # noqa: E402
from genrl.diffusion.policy.trajectory import Batch  # noqa: E402

TOGETHER = 48


def png(picture: torch.Tensor) -> bytes:
    array = (picture * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(file, "png", optimize=True)
    return file.getvalue()


def main(out: Path, samples: int) -> None:
    policy = Policy(DiffusionPipeline.from_pretrained("assets/tiny-t2i"))
    judge = genrl_rewards.load("shapes")
    sampling = {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": 2}
    prompts = [row.text for row in load("assets/prompts/shapes_train.txt")]
    rows: list[dict[str, object]] = []
    for first in range(0, len(prompts), TOGETHER // samples):
        some = prompts[first : first + TOGETHER // samples]
        texts = [text for text in some for _ in range(samples)]
        batch = Batch(texts, [("preferences", first, k) for k in range(len(texts))], sampling)
        with torch.no_grad():
            pictures = policy.decode(batch, policy.roll_out(batch).final)
        values = torch.tensor(genrl_rewards.score(judge, images=pictures, prompts=texts).values).view(-1, samples)
        for row, text in enumerate(some):
            best, worst = int(values[row].argmax()), int(values[row].argmin())
            if values[row, best] > values[row, worst]:
                pair = {"image_win": best, "image_lose": worst}
                images = {name: {"bytes": png(pictures[row * samples + k]), "path": None} for name, k in pair.items()}
                rows.append({"prompt": text} | images)
    columns = {"prompt": datasets.Value("string"), "image_win": datasets.Image(), "image_lose": datasets.Image()}
    out.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows, features=datasets.Features(columns)).to_parquet(out / "train.parquet")
    print(f"{len(rows)} pairs of {len(prompts)} prompts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6)
