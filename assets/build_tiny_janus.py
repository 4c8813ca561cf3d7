"""Make the embedded model of image tokens: a Janus of 0.5 million numbers that half draws what it is told.

    python assets/build_tiny_janus.py     # assets/tiny-janus, about two minutes of one core

Pictures have 32 x 32 pixels and show one or two of the world's shapes (`genrl.world`), large, in one of four places;
an image token stands for 8 x 8 pixels, so there are 16 of them. Three stages: an autoencoder whose latents lie on a
sphere (Janus's decoder normalises codes); the codes, by k-means of the latents, and the decoder again from codes; the
language model from captions to codes, with one caption in ten left out for classifier-free guidance. The last stage
ends when `ENOUGH` of the pictures drawn for training captions are wholly right. Captions with a held-out combination
(`world.held_out`) are among the lessons: which pictures belong to which words is learnt here, to draw them reliably is
left to reinforcement, which sees the others only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.vlm.tasks import captions
from genrl.world import GRAMMAR, Scene, caption, draw
from rewards.shapes import Shapes
from rewards.torchvision_compat import ensure

ensure()

from transformers import (  # noqa: E402
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.janus.configuration_janus import JanusVisionConfig, JanusVQVAEConfig  # noqa: E402
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil  # noqa: E402

ASSETS = Path(__file__).resolve().parent
SEED = 0
PIXELS, PATCH, CODES = 32, 8, 128
HIDDEN, LAYERS = 96, 2
POOL = 4000
STAGES = {"autoencoder": 200, "codes": 200, "language": 800}  # optimiser steps, the last at most
BATCH = {"autoencoder": 16, "codes": 16, "language": 64}
ENOUGH, EVERY, PROBE = 0.5, 50, 100
UNCONDITIONAL = 0.1
SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
MARKS = {"image_token": "<image>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
CHAT = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"


def sample(number: int) -> Scene:
    """The scene of this lesson, held-out combinations among them."""
    return captions.scene(np.random.default_rng(derive_seed("janus", SEED, number)), None)


def make_processor() -> JanusProcessor:
    words = dict.fromkeys([*SPECIAL.values(), *MARKS.values(), "a", *GRAMMAR])
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{name}_token": word for name, word in SPECIAL.items()},
        extra_special_tokens=MARKS,
        model_max_length=96,
    )
    images = JanusImageProcessorPil(size={"height": PIXELS, "width": PIXELS}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return JanusProcessor(images, tokenizer, chat_template=CHAT, num_image_tokens=(PIXELS // PATCH) ** 2)


def make_model(processor: JanusProcessor) -> JanusForConditionalGeneration:
    tokenizer = processor.tokenizer
    special = {name: tokenizer.convert_tokens_to_ids(SPECIAL[name]) for name in ("pad", "bos", "eos")}
    model = JanusForConditionalGeneration(
        JanusConfig(
            text_config={
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 96,
                **{f"{name}_token_id": number for name, number in special.items()},
            },
            vision_config=JanusVisionConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=PIXELS,
                patch_size=PATCH,
                projection_dim=HIDDEN,
                num_image_tokens=(PIXELS // PATCH) ** 2,
                depth=1,
            ),
            vq_config=JanusVQVAEConfig(
                embed_dim=8,
                num_embeddings=CODES,
                latent_channels=32,
                base_channels=32,
                channel_multiplier=[1, 1, 1, 1],
                num_res_blocks=1,
                projection_dim=HIDDEN,
                image_token_embed_dim=HIDDEN,
                num_hidden_layers=2,
            ),
            image_token_id=tokenizer.convert_tokens_to_ids(MARKS["image_token"]),
        )
    )
    settings = model.generation_config
    settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = (special[n] for n in ("pad", "bos", "eos"))
    settings.generation_kwargs = {"boi_token_id": tokenizer.convert_tokens_to_ids(MARKS["boi_token"])}
    settings.guidance_scale = 2.0
    return model


def train_codes(model: JanusForConditionalGeneration, pictures: Tensor) -> None:
    """The first two stages. pictures: [N, 3, H, W] in -1 to 1."""
    vq = model.model.vqmodel
    vq.requires_grad_(True)
    for stage in ("autoencoder", "codes"):
        if stage == "codes":
            points = torch.cat([latents(vq, some) for some in pictures[:1000].split(200)])
            vq.quantize.embedding.weight.data.copy_(centres(points))
            codes = (points @ vq.quantize.embedding.weight.T).argmax(1).view(1000, -1)
            pictures = pictures[:1000]
        moved = [*vq.decoder.parameters(), *vq.post_quant_conv.parameters()]
        if stage == "autoencoder":
            moved += [*vq.encoder.parameters(), *vq.quant_conv.parameters()]
        optimizer = torch.optim.AdamW(moved, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
        steps = STAGES[stage]
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 20, 1.05 - step / steps)
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(len(pictures), (BATCH[stage],), generator=generator)
            batch = pictures[rows]
            if stage == "codes":
                made = vq.decode(codes[rows])
            else:
                made = vq.decoder(vq.post_quant_conv(F.normalize(vq.quant_conv(vq.encoder(batch)), dim=1)))
            loss = F.mse_loss(made, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % EVERY == 0:
                print(f"{stage} {step + 1}: squared error {float(loss.detach()):.4f}", flush=True)


@torch.no_grad()
def latents(vq: torch.nn.Module, pictures: Tensor) -> Tensor:
    """Unit vectors [N h w, 8]."""
    return F.normalize(vq.quant_conv(vq.encoder(pictures)), dim=1).permute(0, 2, 3, 1).reshape(-1, 8)


def centres(points: Tensor) -> Tensor:
    """Spherical k-means, begun at points far from those chosen before; unit vectors [CODES, 8]."""
    generator = torch.Generator().manual_seed(SEED)
    points = points[torch.randperm(len(points), generator=generator)[:8000]]
    chosen = [points[0]]
    nearest = points @ chosen[0]
    while len(chosen) < CODES:
        weights = (1 - nearest).clamp(min=0)
        chosen.append(points[int(torch.multinomial(weights, 1, generator=generator))])
        nearest = torch.maximum(nearest, points @ chosen[-1])
    found = torch.stack(chosen)
    for _ in range(15):
        owner = (points @ found.T).argmax(1)
        sums = torch.zeros_like(found).index_add(0, owner, points)
        found = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums, dim=1), found)
    return found


def train_language(
    model: JanusForConditionalGeneration, processor: JanusProcessor, texts: list[str], codes: Tensor, enough: float
) -> None:
    """The last stage: codes int64 [N, T] from captions."""
    processor.tokenizer.padding_side = "left"
    asked = processor.tokenizer([f"{text} {MARKS['boi_token']}" for text in texts], padding=True, return_tensors="pt")
    kept = (processor.tokenizer.bos_token_id, processor.tokenizer.boi_token_id)
    moved = [p for n, p in model.named_parameters() if "vqmodel" not in n and "vision_model" not in n]
    optimizer = torch.optim.AdamW(moved, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    steps, started = STAGES["language"], time.process_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 40, 1.05 - step / steps)
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(codes), (BATCH["language"],), generator=generator)
        ids, mask = asked.input_ids[rows], asked.attention_mask[rows]
        dropped = torch.rand(len(rows), 1, generator=generator) < UNCONDITIONAL
        words = (ids != kept[0]) & (ids != kept[1])
        ids = torch.where(dropped & words, processor.tokenizer.pad_token_id, ids)
        told = model.prepare_embeddings_for_image_generation(codes[rows, :-1])
        states = model.model.language_model(
            inputs_embeds=torch.cat([model.get_input_embeddings()(ids), told], 1),
            attention_mask=torch.cat([mask, torch.ones(told.shape[:2], dtype=mask.dtype)], 1),
            position_ids=torch.cat([mask, torch.ones(told.shape[:2], dtype=mask.dtype)], 1).cumsum(1).sub(1).clamp(0),
        ).last_hidden_state[:, -codes.shape[1] :]
        loss = F.cross_entropy(model.model.generation_head(states).flatten(0, 1), codes[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(moved, 1.0)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            found = right(model, processor, texts[:PROBE])
            seconds = time.process_time() - started
            print(
                f"language {step + 1}: loss {float(loss.detach()):.3f}, wholly right {found:.3f}, {seconds:.0f} s",
                flush=True,
            )
            if found >= enough:
                break


@torch.no_grad()
def right(model: JanusForConditionalGeneration, processor: JanusProcessor, texts: list[str]) -> float:
    """Share of pictures, drawn with guidance at temperature 1, that show what was asked and nothing else."""
    torch.manual_seed(SEED)
    asked = processor(text=texts, generation_mode="image", padding=True, return_tensors="pt")
    codes = model.generate(**asked, generation_mode="image", do_sample=True)
    pictures = (model.model.vqmodel.decode(codes) * 0.5 + 0.5).clamp(0, 1)
    return float(np.mean(Shapes(strict=True)(pictures, texts)[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-janus")
    parser.add_argument("--enough", type=float, default=ENOUGH)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    started = time.process_time()
    processor = make_processor()
    model = make_model(processor).eval()
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers", flush=True)
    scenes = [sample(number) for number in range(POOL)]
    texts = [caption(scene) for scene in scenes]
    pictures = torch.from_numpy(np.stack([draw(scene, PIXELS) for scene in scenes])).permute(0, 3, 1, 2) / 127.5 - 1
    train_codes(model, pictures)
    with torch.no_grad():
        vq = model.model.vqmodel
        codes = torch.cat([vq.encode(p).image_tokens.view(len(p), -1) for p in pictures.split(200)])
        back = (vq.decode(codes[:500]) * 0.5 + 0.5).clamp(0, 1)
        seen = float(np.mean(Shapes(strict=True)(back, texts[:500])[0]))
    print(f"{len(codes.unique())} codes in use; of pictures back from their codes {seen:.3f} are right", flush=True)
    processor.save_pretrained(args.out)
    model.save_pretrained(args.out)
    train_language(model, processor, texts, codes, args.enough)
    half = {name: value.half() for name, value in model.state_dict().items()}
    model.save_pretrained(args.out, state_dict=half)
    print(f"{time.process_time() - started:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
