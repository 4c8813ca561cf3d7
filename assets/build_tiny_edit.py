"""Make the embedded editing model and its prompt files from nothing but drawn pairs. See assets/README.md.

    python assets/build_tiny_edit.py --stage edit      # assets/tiny-edit, with the autoencoder of assets/tiny-t2i
    python assets/build_tiny_edit.py --stage prompts   # assets/edits

The pairs are sloppy on purpose: nearly half of them show another edit of the same kind than asked. So the model
learns to draw clean pictures with one thing moved or resized, but which way it only half knows: that is left to
reinforcement learning. A function of the seed; goes on from its last checkpoint in `--work`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from build_tiny_models import (
    ASSETS,
    CONSTANT,
    SEED,
    STEPS,
    encode_scenes,
    make_text_encoder,
    make_tokenizer,
    save_half,
    split_parameters,
    start_processes,
    tokenise,
    train,
)
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from genrl.playground import edits
from genrl.playground.shapes import GRAMMAR, draw

PAIRS = 8_000
BATCH = 64
SLOPPINESS = 0.45
MOVES = 0.75  # of the pairs; the others change a size
TARGETS = 96
TURNED, ANGLE = ("triangle", "square"), 30  # things that do not look the same after so many degrees
WORDS = 8  # tokens of an instruction for the T5 encoder: seven words and the end
STEPS["edit"], CONSTANT["edit"] = 600, 0.6


def make_word_encoder() -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """A T5 encoder of two layers, and a tokenizer of whole words."""
    words = ["<pad>", "</s>", "<unk>", *sorted({*GRAMMAR, *edits.EDIT_WORDS})]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=WORDS
    )
    config = T5Config(
        vocab_size=len(words), d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    return T5EncoderModel(config), tokenizer


def make_transformer() -> FluxTransformer2DModel:
    """Adaptive norms and the output start at zero, so that every block starts as the identity."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        num_attention_heads=3,
        attention_head_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for name, module in model.named_modules():
        if name == "proj_out" or name.endswith(
            ("norm1.linear", "norm1_context.linear", ".norm.linear", "norm_out.linear")
        ):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def draw_pairs(number: int = PAIRS) -> tuple[Tensor, Tensor, list[str]]:
    """Pictures before and after, uint8 [N, 3, 64, 64], and instructions."""
    rng = np.random.default_rng([SEED, 7])
    befores, afters, instructions = [], [], []
    for _ in range(number):
        edit = edits.sample_edit(rng, "move" if rng.random() < MOVES else "scale", "all")
        befores.append(draw(edit.scene))
        afters.append(draw(edits.carry_out(rng, edit, SLOPPINESS)))
        instructions.append(edit.instruction)
    return *(
        torch.from_numpy(np.stack(some)).permute(0, 3, 1, 2).contiguous() for some in (befores, afters)
    ), instructions


def pack(latents: Tensor) -> Tensor:
    """[N, 4, 16, 16] -> tokens [N, 64, 16], as the pipeline packs them."""
    packed: Tensor = FluxKontextPipeline._pack_latents(latents, *latents.shape)
    return packed


def stage_edit(args: argparse.Namespace) -> None:
    torch.manual_seed(SEED + 3)
    tokenizer = make_tokenizer(args.work / "tokenizer-edit")
    vae = AutoencoderKL.from_pretrained(ASSETS / "tiny-t2i" / "vae").eval().requires_grad_(False)
    word_encoder, word_tokenizer = make_word_encoder()
    modules = nn.ModuleDict(
        {
            "transformer": make_transformer(),
            "text_encoder": make_text_encoder(tokenizer, CLIPTextModel),
            "text_encoder_2": word_encoder,
        }
    )
    before, after, instructions = draw_pairs()
    sources, targets = pack(encode_scenes(vae, before)), pack(encode_scenes(vae, after))
    ids = tokenise(tokenizer, instructions)
    words = word_tokenizer(instructions, padding="max_length", max_length=WORDS, return_tensors="pt").input_ids
    places = FluxKontextPipeline._prepare_latent_image_ids(1, 8, 8, torch.device("cpu"), torch.float32)
    of_source = places.clone()
    of_source[:, 0] = 1
    image_ids, text_ids = torch.cat([places, of_source]), torch.zeros(WORDS, 3)
    matrices, rest = split_parameters(modules, ("transformer.transformer_blocks", "transformer.single_transformer"))
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=1.5e-3, betas=(0.9, 0.98)),
    ]

    def loss_of(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(targets), (BATCH,), generator=generator)
        clean, noise = targets[rows], torch.randn(BATCH, *targets.shape[1:], generator=generator)
        sigma = torch.randn(BATCH, generator=generator).sigmoid()
        noisy = torch.lerp(clean, noise, sigma[:, None, None])
        velocity = modules["transformer"](
            torch.cat([noisy, sources[rows]], dim=1),
            encoder_hidden_states=modules["text_encoder_2"](words[rows])[0],
            pooled_projections=modules["text_encoder"](ids[rows]).pooler_output,
            timestep=sigma,
            img_ids=image_ids,
            txt_ids=text_ids,
            return_dict=False,
        )[0][:, : noisy.shape[1]]
        return F.mse_loss(velocity, noise - clean)

    def export(modules: nn.ModuleDict, folder: Path) -> None:
        pipeline = FluxKontextPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=vae,
            text_encoder=modules["text_encoder"],
            tokenizer=tokenizer,
            text_encoder_2=modules["text_encoder_2"],
            tokenizer_2=word_tokenizer,
            transformer=modules["transformer"],
        )
        save_half(pipeline, folder)

    train("edit", modules, optimizers, loss_of, export, args, 0, 1)
    # The last weights: their average (EMA .998) is of 500 steps, most of this run, and draws worse shapes.
    modules.load_state_dict(torch.load(args.work / "edit.pt", weights_only=True)["modules"])
    export(modules, args.out / "tiny-edit")


def stage_prompts(args: argparse.Namespace) -> None:
    folder = args.out / "edits"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for task in ("move", "scale"):
        for split in ("train", "eval"):
            rows = []
            for k, edit in enumerate(edits.edits(task, split)):
                picture = f"pictures/{task}_{split}_{k:03d}.png"
                Image.fromarray(draw(edit.scene)).save(folder / picture, optimize=True)
                rows.append(json.dumps({"prompt": edit.instruction, "source_image": picture, **edit.columns}))
            (folder / f"{task}_{split}.jsonl").write_text("\n".join(rows) + "\n")
            if task == "move":
                turns = [turn(row) for row in map(json.loads, rows) if row["object"].endswith(TURNED)]
                (folder / f"turn_{split}.jsonl").write_text("\n".join(map(json.dumps, turns)) + "\n")
    # Pairs to start from: what some of the edits to train on come to, when they are carried out as asked.
    rng, rows = np.random.default_rng([SEED, 8]), []
    for k, edit in enumerate(edits.edits("move", "train")[:TARGETS]):
        target = f"pictures/move_target_{k:03d}.png"
        Image.fromarray(draw(edits.carry_out(rng, edit))).save(folder / target, optimize=True)
        source = f"pictures/move_train_{k:03d}.png"
        rows.append(
            json.dumps({"prompt": edit.instruction, "source_image": source, "target_image": target, **edit.columns})
        )
    (folder / "move_pairs.jsonl").write_text("\n".join(rows) + "\n")


def turn(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a prompt file that asks to turn the thing of this one: one way for left and up, else the other."""
    sign, way = (1, "clockwise") if row["direction"] in ("left", "up") else (-1, "counterclockwise")
    prompt = f"turn the {row['object']} {ANGLE} degrees {way}"
    asked = {"object": row["object"], "axis": "rotation", "angle": sign * ANGLE}
    return {"prompt": prompt, "source_image": row["source_image"], **asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"edit": stage_edit, "prompts": stage_prompts}
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS['edit']}")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the model folder goes")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-models"), help="checkpoints")
    parser.add_argument("--snapshots", type=int, help="export a pipeline to the work folder every so many steps")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    start_processes()
    stages[args.stage](args)


if __name__ == "__main__":
    main()
