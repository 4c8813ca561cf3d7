"""`genrl sample` and `genrl eval`: pictures and scores of any pipeline, with or without an adapter.

Sampling here is a plain pipeline call: prompt k of seed s is drawn, alone, from `torch.Generator().manual_seed(s + k)`,
so a script with diffusers alone gives the same picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

import rewards
from genrl.config import Model
from genrl.diffusion.evaluate import Evaluated, evaluate
from genrl.diffusion.export import load_lora
from genrl.diffusion.loading import check_call_arguments, load_pipeline
from genrl.diffusion.policy import Policy
from genrl.diffusion.scoring import Scorers
from genrl.prompts import Prompt
from genrl.runtime.pictures import grid, save_png, to_pil
from genrl.runtime.run import write_atomic


def load(model: Model, lora: str | None) -> DiffusionPipeline:
    """A pipeline and, where given, its adapter (a folder or hub id), on the best device at hand."""
    pipe = load_pipeline(model)
    if lora:
        load_lora(pipe, lora)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")


def sample(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Draw one picture per prompt into `out` (00000.png, ..., prompts.json, grid.png); returns the pictures' paths.

    arguments: of the pipeline call (num_inference_steps, guidance_scale, height, ...). Raises ValueError for one that
    the pipeline does not take.
    """
    check_call_arguments(pipe, arguments or (), section=None)
    out.mkdir(parents=True, exist_ok=True)
    paths, pictures = [], []
    for k, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed + k)
        made = pipe(prompt=prompt, generator=generator, output_type="pt", return_dict=False, **(arguments or {}))[0][0]
        picture = to_pil(made.cpu())
        paths.append(save_png(picture, out / f"{k:05d}.png"))
        pictures.append(picture)
    record = [{"file": path.name, "prompt": prompts[k], "seed": seed + k} for k, path in enumerate(paths)]
    write_atomic(out / "prompts.json", json.dumps(record, indent=1, ensure_ascii=False))
    save_png(grid(pictures[:64], list(prompts[:64])), out / "grid.png")
    return paths


def evaluate_pipeline(
    pipe: DiffusionPipeline,
    prompts: Sequence[Prompt],
    scorers: Scorers,
    *,
    batch_size: int = 8,
    seed: int = 1234,
    num_pictures: int = 16,
    arguments: Mapping[str, Any],
) -> Evaluated:
    """Score one picture per prompt by every reward: the evaluation of training, on any pipeline."""
    check_call_arguments(pipe, arguments, section=None)
    for label, scorer in scorers.rewards.items():
        rewards.check_columns(scorer, prompts[0].columns, name=label)
    return evaluate(
        Policy(pipe),
        prompts,
        scorers,
        arguments,
        batch_size=batch_size,
        seed=seed,
        num_pictures=num_pictures,
    )
