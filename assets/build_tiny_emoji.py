"""Make the embedded text-to-image model of the world of emoji from drawn scenes. See assets/README.md.

    python assets/build_tiny_emoji.py --stage emoji-vae   # the autoencoder, then
    python assets/build_tiny_emoji.py --stage emoji       # assets/tiny-emoji
    python assets/build_tiny_emoji.py --stage scores      # of held-out prompts; a grid of pictures in --work
    python assets/build_tiny_emoji.py --stage prompts     # assets/prompts/emoji_*.txt, assets/emoji_world.png

One process of one thread; torchrun starts two, as with `build_tiny_models.py`, whose parts and training these are. A
stage goes on from its last checkpoint in `--work`, also to more steps than it was asked for before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from genrl_rewards.models.torchvision_compat import ensure

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
    split_parameters,
    start_processes,
    tokenise,
    train,
    train_vae,
)
from diffusers import AutoencoderKL, DiffusionPipeline  # noqa: E402
from score_tiny_models import sample  # noqa: E402
from transformers import CLIPTokenizer  # noqa: E402

from genrl.playground import emoji as emoji_world  # noqa: E402
from genrl.playground.emoji import KINDS  # noqa: E402
from genrl_rewards.contract import to_uint8  # noqa: E402
from genrl_rewards.scorers.objects.emoji import PLURALS, Emoji  # noqa: E402

SCENES = {"emoji-vae": 8_000, "emoji": 30_000}
BATCH = 32  # over all processes
STEPS["emoji-vae"], CONSTANT["emoji-vae"] = 2000, 0.6
STEPS["emoji"], CONSTANT["emoji"] = 4000, 0.6


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` (Nesterov momentum .95, five Newton-Schulz steps) in float32, matrices of a shape together.

    In bfloat16, as torch has it, it takes twice as long as the model on a processor without bfloat16 arithmetic.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    mean = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(mean, group["momentum"]))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_add_(parameters, list(orthogonal(torch.stack(updates))), alpha=-rate)


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [K, N, M] with their singular values moved to about one (Muon's quintic iteration)."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


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
    latents, ids = encoded_scenes(vae, tokenizer, args.work / f"emoji-scenes-{rank}-{world_size}.pt", rank, world_size)
    loss_of = flow_loss(modules, latents, ids, tokenise(tokenizer, [""]), BATCH // world_size)
    matrices, rest = split_parameters(modules, "transformer.transformer_blocks")
    optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1.5e-3, betas=(0.9, 0.98))]

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        export_t2i(modules, vae, tokenizer, folder)

    train("emoji", modules, optimizers, loss_of, export, args, rank, world_size)
    if rank == 0:
        export(modules, args.out / "tiny-emoji")


def encoded_scenes(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, file: Path, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Latents [N, 4, 16, 16] and tokens [N, 16] of this process's scenes; kept in the file, for they take minutes."""
    if not file.exists():
        pictures, captions = draw_scenes("emoji", rank, world_size)
        torch.save((encode_scenes(vae, pictures), tokenise(tokenizer, captions)), file)
    latents, ids = torch.load(file, weights_only=True)
    return latents, ids


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


def stage_scores(args: argparse.Namespace, rank: int, world_size: int) -> None:
    """Soft / strict / objects over the held-out prompts, and by kind; picture i starts from the noise of seed i."""
    pipeline = DiffusionPipeline.from_pretrained(args.out / "tiny-emoji")
    pipeline.set_progress_bar_config(disable=True)
    prompts = emoji_world.prompts("eval", 160)
    for guidance, steps in ((1.0, 8), (2.0, 8), (4.0, 8), (4.0, 20)):
        call = {"guidance_scale": guidance, "num_inference_steps": steps, "max_sequence_length": 2}
        pictures = sample(pipeline, prompts, call)
        _, parts = Emoji()(pictures, prompts)
        kinds = np.array([emoji_world.kind_of(prompt) for prompt in prompts])
        means = {name: np.array(parts[name]) for name in ("soft", "strict", "objects")}
        by_kind = [f"{kind} {' / '.join(f'{m[kinds == kind].mean():.2f}' for m in means.values())}" for kind in KINDS]
        overall = " / ".join(f"{m.mean():.3f}" for m in means.values())
        print(f"guidance {guidance}, {steps} steps: {overall} ({', '.join(by_kind)})", flush=True)
        tiles = F.pad(pictures[:50], (1, 1, 1, 1), value=0.8)
        grid = torch.cat([torch.cat(list(row), dim=2) for row in tiles.split(10)], dim=1)
        Image.fromarray(to_uint8(grid)).save(args.work / f"emoji-{guidance}-{steps}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"emoji-vae": stage_vae, "emoji": stage_emoji, "scores": stage_scores, "prompts": stage_prompts}
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--steps", type=int, help=f"default: { {name: STEPS[name] for name in SCENES} }")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the model folder and prompts go")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-models"), help="checkpoints of the stages")
    parser.add_argument("--snapshots", type=int, help="export a pipeline to the work folder every so many steps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args, *start_processes())


if __name__ == "__main__":
    main()
