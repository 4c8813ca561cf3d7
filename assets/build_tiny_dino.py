"""Make assets/tiny-dino: a small Dinov2Model that knows the embedded world. See assets/README.md.

python assets/build_tiny_dino.py assets/tiny-dino

The class token is taught how many things of each colour and shape there are and where, each patch what it shows. Half
of the pictures went through the autoencoder of tiny-t2i, so that features tell contents rather than a decoder's traces.
A function of the seed; one process of one thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrl.playground import shapes as world
from genrl_rewards.models.pixels import normalise
from genrl_rewards.models.torchvision_compat import ensure
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES
from genrl_rewards.scorers.pictures.dino import MEAN, STD

ensure()

from diffusers import AutoencoderKL  # noqa: E402
from transformers import Dinov2Config, Dinov2Model  # noqa: E402

SEED = 0
SCENES, STEPS, BATCH, RATE = 6000, 4000, 48, 1.5e-3
WIDTH = 64
KINDS = len(COLOURS) * len(SHAPES)
RARE = torch.tensor([0.1, 1.0, 1.0, 1.0, 1.0])  # most kinds are not in most pictures
CELLS = 8  # patches of a side
PATCH = world.SIZE // CELLS


def labels(scene: world.Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a scene holds: number of things by kind [20], their mean places in [0, 1] [20, 2], and what each patch shows
    [8, 8]: 0 nothing, 1 + kind, 21 a sign."""
    counts, places = np.zeros(KINDS, int), np.zeros((KINDS, 2), np.float32)
    patches = np.zeros((CELLS, CELLS), int)
    centres = (np.arange(CELLS) + 0.5) * PATCH
    for thing in scene.things:
        kind = COLOURS.index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape)
        places[kind] += np.array([thing.x, thing.y], np.float32) / world.SIZE
        counts[kind] += 1
        distance = np.hypot(centres[None, :] - thing.x, centres[:, None] - thing.y)
        patches[distance < thing.radius] = 1 + kind
    if scene.sign is not None:
        x, y = world.SIZE / 2 + scene.sign.x, world.SIZE / 2 + scene.sign.y
        patches[(abs(centres - y) < 15)[:, None] & (abs(centres - x) < 30)[None, :]] = 1 + KINDS
    return counts, places / np.maximum(counts, 1)[:, None], patches


@torch.no_grad()
def reconstructed(pictures: Tensor) -> Tensor:
    """uint8 [N, 3, H, W] through the autoencoder and back."""
    vae = AutoencoderKL.from_pretrained("assets/tiny-t2i", subfolder="vae")
    parts = []
    for some in pictures.split(64):
        decoded = vae.decode(vae.encode(some.float() / 127.5 - 1).latent_dist.mean).sample
        parts.append(((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8))
    return torch.cat(parts)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng([SEED, 7])
    scenes = [world.sample_scene(rng, split="all", word_share=0.15) for _ in range(SCENES)]
    pictures = torch.stack([torch.from_numpy(world.draw(scene)).permute(2, 0, 1) for scene in scenes])
    counts, places, patches = (torch.from_numpy(np.stack(rows)) for rows in zip(*map(labels, scenes), strict=True))
    pictures[SCENES // 2 :] = reconstructed(pictures[SCENES // 2 :])

    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        mlp_ratio=4,
        image_size=world.SIZE,
        patch_size=PATCH,
    )
    model = Dinov2Model(config)
    of_class, of_patch = nn.Linear(WIDTH, KINDS * 5 + KINDS * 2), nn.Linear(WIDTH, KINDS + 2)
    trained = [*model.parameters(), *of_class.parameters(), *of_patch.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    order = np.random.default_rng([SEED, 8])
    started = time.process_time()
    for step in range(1, STEPS + 1):
        rows = torch.from_numpy(order.choice(SCENES, BATCH, replace=False))
        tokens = model(pixel_values=normalise(pictures[rows].float() / 255, MEAN, STD)).last_hidden_state
        whole, number = of_class(tokens[:, 0]), counts[rows]
        numbers, centres = whole[:, : KINDS * 5].view(-1, KINDS, 5), whole[:, KINDS * 5 :].view(-1, KINDS, 2)
        there = number > 0
        kinds = of_patch(tokens[:, 1:])
        counting = F.cross_entropy(numbers.flatten(0, 1), number.flatten(), weight=RARE)
        placing = F.mse_loss(centres[there], places[rows][there]) if bool(there.any()) else whole.sum() * 0
        showing = F.cross_entropy(kinds.flatten(0, 1), patches[rows].flatten())
        loss = counting + 5 * placing + showing
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == 1:
            right = float((numbers.argmax(-1) == number)[there].float().mean())
            seen = float((kinds.argmax(-1) == patches[rows].flatten(1))[patches[rows].flatten(1) > 0].float().mean())
            print(
                f"{step} counting {counting:.3f} placing {placing:.4f} showing {showing:.3f}, right: counts {right:.2f}"
                f" patches {seen:.2f}, {time.process_time() - started:.0f} s",
                flush=True,
            )
    model.eval().save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
