"""Supervised fine-tuning of a pipeline on given pictures, against a loop as diffusers' own training scripts have it.

    python -m benchmarks.peer_diffusers_sft [--rounds 5]

The loop is a stand-in of our own, and does the least that such a script can: pictures are opened, cut and encoded by
the autoencoder, prompts were encoded once before training, one call of the denoiser with gradients, AdamW. It writes
nothing. genrl's loop is its own, with metrics. Both share checkpoint, LoRA, pictures, batch and optimiser, and take
turns, iteration by iteration; the first round is a warm-up. Seconds are the processor's. Prints the ratio and
writes peer_diffusers_sft.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from benchmarks.common import Turns, beside, clock, opened, turns_taken
from benchmarks.peer_flow_grpo import usual_pipeline
from genrl.config import load
from genrl.data import prompts as prompt_files
from genrl.data.preferences import TARGET_COLUMNS, as_tensor, open_set
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.sft import train as sft
from genrl.diffusion.methods.sft.settings import PipelineSFT
from genrl.runtime.weights.devices import default_device

CHANGES = (
    "model.path=assets/tiny-t2i",
    "rewards=[{name: shapes}]",
    "sampling.inputs={}",
    "sampling.pipeline_args={max_sequence_length: 8}",
    "evaluation.every=0",
    "checkpoint.every=1000000",
    "trackers=[]",
)
"""To configs/diffusion/talk2move_sft.yaml: its pictures alone, for a model of texts."""


def usual_loop(config: Config) -> Iterator[None]:
    """The stand-in, one iteration per item."""
    assert config.model.lora is not None
    device, sampling = default_device(), config.sampling
    pipe = usual_pipeline(config)
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, weight_decay=0.0)
    rows = prompt_files.load(config.prompts.train)
    read = open_set(config.prompts.train, rows, TARGET_COLUMNS)
    generator = torch.Generator().manual_seed(config.seed)
    encoded: dict[str, Any] = {}
    for row in rows:
        with torch.no_grad():
            text, _, pooled, _ = pipe.encode_prompt(row.text, None, None, **sampling.pipeline_args)
        encoded[row.text] = (text, pooled)
    while True:
        chosen = torch.randperm(len(rows), generator=generator)[: sampling.prompts_per_iteration].tolist()
        pictures = [as_tensor(*read(rows[k]), sampling.height or 64, sampling.width or 64) for k in chosen]
        with torch.no_grad():
            pixels = (2 * torch.stack(pictures) - 1).to(device, pipe.vae.dtype)
            latents = pipe.vae.encode(pixels).latent_dist.mode()
            clean = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator).to(clean)
        sigma = torch.randn(len(clean), generator=generator).sigmoid().to(clean)
        level = sigma[:, None, None, None]
        made = pipe.transformer(
            hidden_states=(1 - level) * clean + level * noise,
            timestep=1000 * sigma,
            encoder_hidden_states=torch.cat([encoded[rows[k].text][0] for k in chosen]),
            pooled_projections=torch.cat([encoded[rows[k].text][1] for k in chosen]),
            return_dict=False,
        )[0]
        nn.functional.mse_loss(made.float(), noise - clean).backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield


def measure(rounds: int, changes: list[str]) -> dict[str, Any]:
    """Of the rounds after the first: medians of the seconds of either, and of the ratio of neighbours; its range."""
    config = load("configs/diffusion/talk2move_sft.yaml", [*CHANGES, *changes, f"iterations={rounds + 2}"])
    assert isinstance(config, Config) and isinstance(config.trainer, PipelineSFT)
    settings = config.trainer
    with ExitStack() as stack:
        run = opened(config, stack)
        finish = run.finish

        def loop(wait: Any) -> None:
            run.finish = lambda metrics: (finish(metrics), wait())  # type: ignore[method-assign,assignment,return-value]
            sft.train(run, settings)

        theirs, ours = usual_loop(config), Turns(loop)
        stack.callback(ours.close)
        spent = []
        for _ in range(rounds + 1):
            begun = clock()
            next(theirs)
            middle = clock()
            ours.next()
            spent.append({"theirs": (middle - begun)._asdict(), "ours": (clock() - middle)._asdict()})
    return {"pictures": config.sampling.images_per_iteration, **turns_taken(spent)}


def main() -> None:
    beside(__doc__, "peer_diffusers_sft", "pictures", "the usual loop", measure)


if __name__ == "__main__":
    main()
