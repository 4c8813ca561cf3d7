"""Make the demo's text-to-image model: it draws every shape well and follows its caption only in part.

    python assets/build_tiny_shapes.py --stage shapes      # on from assets/tiny-t2i, true captions, then
    python assets/build_tiny_shapes.py --stage captions    # a few steps on careless captions: assets/tiny-shapes
    python assets/build_tiny_shapes.py --stage prompts     # assets/prompts/things_*.txt: those of shapes without places

Models that learn from the captions of the web are like that: they know more than they do. Following the caption is what
reinforcement learning mends in the demo. One process of one thread; see assets/README.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from genrl_rewards.models.torchvision_compat import ensure

ensure()

from build_tiny_emoji import Muon  # noqa: E402
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
    split_parameters,
    start_from,
    start_processes,
    tokenise,
    train,
)
from diffusers import AutoencoderKL, DiffusionPipeline  # noqa: E402

from genrl.playground import shapes as world  # noqa: E402
from genrl_rewards.scorers.objects.shapes import COLOURS, RELATIONS, SHAPES, Group  # noqa: E402

SCENES = 30_000
BATCH = 64
STEPS |= {"shapes": 2500, "captions": 150}
CONSTANT |= {"shapes": 0.5, "captions": 0.5}
RADIUS, GRID, APART = 9.0, 8, 23.5  # pixels: things of one size, at multiples of a patch, are learnt in minutes
RATE = {"shapes": 0.02, "captions": 0.005}  # Muon's; AdamW's is a thirteenth of it
CARELESS = 0.25  # of the captions have a word that is not true


def careless(rng: np.random.Generator, scene: world.Scene) -> str:
    """A caption in which one thing is wrong: a number, a colour, a shape, or where the first thing is."""
    while True:
        groups, relation = list(scene.groups), scene.relation
        wrong = rng.choice(["count", "colour", "shape", "relation"])
        at = int(rng.integers(len(groups)))
        count, colour, shape = groups[at].count, groups[at].colour, groups[at].shape
        if wrong == "relation" and relation:
            relation = str(rng.choice([r for r in RELATIONS if r != relation]))
        elif wrong == "count" and scene.kind in ("count", "mixed"):
            count = int(rng.choice([n for n in (1, 2, 3, 4) if n != count]))
        elif wrong == "colour":
            colour = str(rng.choice([c for c in COLOURS if c != colour]))
        elif wrong == "shape":
            shape = str(rng.choice([s for s in SHAPES if s != shape]))
        else:
            continue
        groups[at] = Group(count, colour, shape)
        if len({(group.colour, group.shape) for group in groups}) == len(groups):
            return world.caption(world.Scene(scene.kind, groups=tuple(groups), relation=relation))


def on_grid(rng: np.random.Generator, scene: world.Scene) -> world.Scene:
    """The scene with its things elsewhere: all of one size, at multiples of `GRID`, apart and in their relation."""
    places = np.arange(2 * GRID - 4, world.SIZE - GRID, GRID, dtype=float)
    while True:
        centres = [rng.choice(places, size=2) for _ in scene.things]
        apart = all(np.hypot(*(a - b)) >= APART for a, b in combinations(centres, 2))
        if apart and (scene.relation is None or world.clearly(scene.relation, *centres)):
            return replace(scene, things=tuple(map(moved, scene.things, centres)))


def moved(thing: world.Thing, centre: np.ndarray) -> world.Thing:
    return replace(thing, x=float(centre[0]), y=float(centre[1]), radius=RADIUS)


def scenes(vae: AutoencoderKL, file: Path) -> tuple[Tensor, list[str], list[str]]:
    """Latents [N, 4, 16, 16] of the scenes, their true captions, and careless ones; kept in the file for all stages."""
    if not file.exists():
        rng, latents, captions = np.random.default_rng(SEED), [], []
        for _ in range(0, SCENES, 500):
            some = [on_grid(rng, world.sample_scene(rng, split="all", word_share=0)) for _ in range(500)]
            pictures = torch.from_numpy(np.stack([world.draw(scene) for scene in some])).permute(0, 3, 1, 2)
            latents.append(encode_scenes(vae, pictures))
            captions += [(world.caption(scene), careless(rng, scene)) for scene in some]
        torch.save((torch.cat(latents), captions), file)
    latents, captions = torch.load(file, weights_only=True)
    return latents, [true for true, _ in captions], [wrong for _, wrong in captions]


def stage_train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.manual_seed(SEED + 6)
    tokenizer = make_tokenizer(args.work / "tokenizer-shapes")
    start = DiffusionPipeline.from_pretrained(ASSETS / "tiny-t2i", torch_dtype=torch.float32)
    modules = make_modules(tokenizer)
    for name, module in modules.items():
        module.load_state_dict(getattr(start, name).state_dict())
    if args.stage == "captions":
        start_from(modules, args.work / "shapes.pt")
    latents, captions, wrong = scenes(start.vae, args.work / "scenes.pt")
    if args.stage == "captions":
        captions = [wrong[i] if i < CARELESS * len(captions) else true for i, true in enumerate(captions)]
    ids = tokenise(tokenizer, captions)
    loss_of = flow_loss(modules, latents, ids, tokenise(tokenizer, [""]), BATCH)
    matrices, rest = split_parameters(modules, "transformer.transformer_blocks")
    rate = RATE[args.stage]
    optimizers = [Muon(matrices, lr=rate), torch.optim.AdamW(rest, lr=rate * 0.075, betas=(0.9, 0.98))]

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        export_t2i(modules, start.vae, tokenizer, folder)

    train(args.stage, modules, optimizers, loss_of, export, args, rank, world_size)
    export(modules, args.out / "tiny-shapes" if args.stage == "captions" else args.work / args.stage)


def stage_prompts(args: argparse.Namespace, rank: int, world_size: int) -> None:
    for split in ("train", "eval"):
        lines = [text for text in world.shapes_prompts(split) if not any(f" {r} " in text for r in RELATIONS)]
        (args.out / "prompts" / f"things_{split}.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"shapes": stage_train, "captions": stage_train, "prompts": stage_prompts}
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the model folder goes")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-models"), help="checkpoints of the stages")
    parser.add_argument("--snapshots", type=int, help="export a pipeline to the work folder every so many steps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args, *start_processes())


if __name__ == "__main__":
    main()
