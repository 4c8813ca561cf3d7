"""Make the embedded text-to-image model of the world of emoji from drawn scenes. See assets/README.md.

    python assets/build_tiny_emoji.py --stage emoji-vae   # the autoencoder, then
    python assets/build_tiny_emoji.py --stage emoji       # assets/tiny-emoji
    python assets/build_tiny_emoji.py --stage prompts     # assets/prompts/emoji_*.txt, assets/emoji_world.png

One process of one thread; torchrun starts two, as with `build_tiny_models.py`, whose parts and training these are. A
stage goes on from its last checkpoint in `--work`, also to more steps than it was asked for before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from rewards.models.torchvision_compat import ensure

ensure()

from build_tiny_models import (  # noqa: E402
    ASSETS,
    CONSTANT,
    SEED,
    STEPS,
    encode_scenes,
    export_t2i,
    flow_loss,
    make_modules,
    make_tokenizer,
    start_processes,
    t2i_optimizers,
    tokenise,
    train,
    train_vae,
)
from diffusers import AutoencoderKL  # noqa: E402

from genrl.data import emoji_world  # noqa: E402
from rewards.scorers.objects.emoji import PLURALS  # noqa: E402

SCENES = {"emoji-vae": 8_000, "emoji": 30_000}
BATCH = 40  # over all processes
STEPS["emoji-vae"], CONSTANT["emoji-vae"] = 2000, 0.6
STEPS["emoji"], CONSTANT["emoji"] = 6000, 0.6


def draw_scenes(stage: str, rank: int, world_size: int) -> tuple[Tensor, list[str]]:
    """This process's share of the scenes: pictures uint8 [N, 3, 64, 64] and captions."""
    rng = np.random.default_rng([SEED, rank, world_size, 64])
    scenes = [emoji_world.sample_scene(rng) for _ in range(SCENES[stage] // world_size)]
    pictures = torch.from_numpy(np.stack([emoji_world.draw(scene) for scene in scenes])).permute(0, 3, 1, 2)
    return pictures.contiguous(), [emoji_world.caption(scene) for scene in scenes]


def stage_vae(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(SEED + 4)
    train_vae("emoji-vae", draw_scenes("emoji-vae", rank, world_size)[0], args, rank, world_size)


def stage_emoji(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(SEED + 5)
    tokenizer = make_tokenizer(args.work / f"tokenizer-{rank}", emoji_world.WORDS)
    vae = AutoencoderKL.from_pretrained(args.work / "emoji-vae").eval().requires_grad_(False)
    modules = make_modules(tokenizer)
    singular, plural = (tokenizer.convert_tokens_to_ids(list(words)) for words in (PLURALS, PLURALS.values()))
    for name in ("text_encoder", "text_encoder_2"):  # a plural starts as its singular: what one learns, both know
        embedding = modules[name].get_input_embeddings().weight.data
        embedding[plural] = embedding[singular]
    pictures, captions = draw_scenes("emoji", rank, world_size)
    latents, ids = encode_scenes(vae, pictures), tokenise(tokenizer, captions)
    loss_of = flow_loss(modules, latents, ids, tokenise(tokenizer, [""]), BATCH // world_size)

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        export_t2i(modules, vae, tokenizer, folder)

    train("emoji", modules, t2i_optimizers(modules), loss_of, export, args, rank, world_size)
    if rank == 0:
        export(modules, args.out / "tiny-emoji")


def stage_prompts(args: argparse.Namespace, rank: int, world_size: int) -> None:
    for split, number in (("train", 512), ("eval", 160)):
        lines = emoji_world.prompts(split, number)
        (args.out / "prompts" / f"emoji_{split}.txt").write_text("\n".join(lines) + "\n")
    rng = np.random.default_rng(SEED)
    grid = Image.new("RGB", (8 * 66, len(emoji_world.KINDS) * 66), (200, 200, 200))
    for row, kind in enumerate(emoji_world.KINDS):
        for column in range(8):
            picture = emoji_world.draw(emoji_world.sample_scene(rng, kind))
            grid.paste(Image.fromarray(picture), (column * 66 + 1, row * 66 + 1))
    grid.save(args.out / "emoji_world.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"emoji-vae": stage_vae, "emoji": stage_emoji, "prompts": stage_prompts}
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--steps", type=int, help=f"default: { ({name: STEPS[name] for name in SCENES}) }")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the model folder and prompts go")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-models"), help="checkpoints of the stages")
    parser.add_argument("--snapshots", type=int, help="export a pipeline to the work folder every so many steps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args, *start_processes())


if __name__ == "__main__":
    main()
