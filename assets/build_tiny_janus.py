"""Make the embedded model of image tokens: a Janus of 1.1 million numbers that draws two in five captions rightly.

    python assets/build_tiny_janus.py     # assets/tiny-janus, about a minute of one core

Pictures have 32 x 32 pixels and show one or two of the world's shapes (`genrl.playground.shapes`), large, in one of
four places; an image token stands for 8 x 8 pixels, so there are 16 of them. There are fewer kinds of patches than
codes, so each is a code. Three stages: vectors of the codes and the decoder, on pictures with a thing in each quarter;
the encoder, to these vectors; the language model from captions to codes, one caption in ten being left out for
guidance. The last one ends when `ENOUGH` of the pictures drawn for lessons are wholly right. Held-out captions
(`tasks.captions`) are among the lessons: which pictures belong to which words is learnt here, to draw them reliably is
left to reinforcement, which sees the others only.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.shapes import GRAMMAR, Scene, Thing, caption, draw
from genrl.playground.tasks import making
from genrl.vlm.policies.image_tokens import TRAINED
from genrl_rewards.models.torchvision_compat import ensure
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, Shapes

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
STEPS = {"decoder": 700, "encoder": 150, "language": 800}  # of the optimiser, the last at most
BATCH = {"decoder": 8, "encoder": 8, "language": 64}
ENOUGH, EVERY, PROBE = 0.4, 50, 100
UNCONDITIONAL = 0.1
SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
MARKS = {"image_token": "<image>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
CHAT = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"


def sample(number: int) -> Scene:
    """The scene of this lesson, held-out combinations among them."""
    return making.scene(np.random.default_rng(derive_seed("janus", SEED, number)), None)


def crowd(number: int) -> tuple[Thing, ...]:
    """A thing in every quarter, now and then none."""
    rng = np.random.default_rng(derive_seed("crowd", SEED, number))
    things = []
    for corner in range(4):
        shape, colour = SHAPES[rng.integers(len(SHAPES))], COLOURS[rng.integers(len(COLOURS))]
        if rng.random() < 0.9:
            x, y = 16.0 + 32 * (corner % 2), 16.0 + 32 * (corner // 2)
            things.append(Thing(colour, shape, x, y, making.RADIUS[shape]))
    return tuple(things)


def painted(scenes: list[Scene]) -> Tensor:
    """Pictures [N, 3, H, W] in -1 to 1."""
    return torch.from_numpy(np.stack([draw(scene, PIXELS) for scene in scenes])).permute(0, 3, 1, 2) / 127.5 - 1


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
                channel_multiplier=[1, 1, 1, 2],
                num_res_blocks=1,
                projection_dim=HIDDEN,
                image_token_embed_dim=HIDDEN,
                num_hidden_layers=2,
            ),
            image_token_id=tokenizer.convert_tokens_to_ids(MARKS["image_token"]),
        )
    )
    with torch.no_grad():  # the usual spread of .02 is for thousands of channels
        for name, parameter in model.named_parameters():
            if name.split(".")[1] in TRAINED and parameter.dim() == 2:
                parameter.mul_(4.0)
    settings = model.generation_config
    settings._from_model_config = False  # else what is set below is not read back
    settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = (special[n] for n in ("pad", "bos", "eos"))
    settings.generation_kwargs = {"boi_token_id": tokenizer.convert_tokens_to_ids(MARKS["boi_token"])}
    settings.guidance_scale = 2.0
    return model


def patches(pictures: Tensor) -> Tensor:
    """Pictures [N, 3, H, W] as rows of patches [N T, 3 PATCH PATCH]."""
    cut = pictures.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # [N, 3, h, w, PATCH, PATCH]
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * PATCH * PATCH)


def coded(pictures: Tensor, known: Tensor) -> Tensor:
    """The numbers of their patches among the `known` ones, int64 [N, T]."""
    return torch.cdist(patches(pictures), known).argmin(1).view(len(pictures), -1)


def train_codes(model: JanusForConditionalGeneration, pictures: Tensor, codes: Tensor) -> None:
    """A vector and a picture for every code: first the vectors and the decoder, then the encoder towards the vectors.

    pictures: [N, 3, H, W] in -1 to 1, whose codes [N, T] are known.
    """
    vq = model.model.vqmodel
    vq.requires_grad_(True)
    vectors = vq.quantize.embedding.weight
    stages = {
        "decoder": [vectors, *vq.post_quant_conv.parameters(), *vq.decoder.parameters()],
        "encoder": [*vq.encoder.parameters(), *vq.quant_conv.parameters()],
    }
    for stage, moved in stages.items():
        optimizer = torch.optim.AdamW(moved, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(STEPS[stage]):
            optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 20, 1.02 - step / STEPS[stage])
            rows = torch.randint(len(pictures), (BATCH[stage],), generator=torch.Generator().manual_seed(step))
            if stage == "decoder":
                loss = F.mse_loss(vq.decode(codes[rows]), pictures[rows])
            else:
                encoded = F.normalize(vq.quant_conv(vq.encoder(pictures[rows])), dim=1).flatten(2).transpose(1, 2)
                loss = F.cross_entropy(
                    (encoded @ F.normalize(vectors.detach(), dim=1).T / 0.1).flatten(0, 1), codes[rows].flatten()
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % EVERY == 0:
                print(f"{stage} {step + 1}: loss {float(loss.detach()):.4f}", flush=True)
    with torch.no_grad():
        vectors.copy_(F.normalize(vectors, dim=1))  # as the decoder reads them; the encoder's nearest is then right


def train_language(
    model: JanusForConditionalGeneration, processor: JanusProcessor, texts: list[str], codes: Tensor, enough: float
) -> None:
    """The last stage: codes int64 [N, T] from captions."""
    processor.tokenizer.padding_side = "left"
    asked = processor.tokenizer([f"{text} {MARKS['boi_token']}" for text in texts], padding=True, return_tensors="pt")
    kept = (processor.tokenizer.bos_token_id, processor.tokenizer.boi_token_id)
    moved = [p for n, p in model.named_parameters() if "vqmodel" not in n and "vision_model" not in n]
    optimizer = torch.optim.AdamW(moved, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    model.model.generation_embeddings.weight.data.copy_(model.model.vqmodel.quantize.embedding.weight)
    steps, started = STEPS["language"], time.process_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min((step + 1) / 40, 1.05 - step / steps)
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(codes), (BATCH["language"],), generator=generator)
        ids, mask = asked.input_ids[rows], asked.attention_mask[rows]
        dropped = torch.rand(len(rows), 1, generator=generator) < UNCONDITIONAL
        words = (ids != kept[0]) & (ids != kept[1])
        ids = torch.where(dropped & words, processor.tokenizer.pad_token_id, ids)
        past = model.prepare_embeddings_for_image_generation(codes[rows, :-1])
        states = model.model.language_model(
            inputs_embeds=torch.cat([model.get_input_embeddings()(ids), past], 1),
            attention_mask=torch.cat([mask, torch.ones(past.shape[:2], dtype=mask.dtype)], 1),
            position_ids=torch.cat([mask, torch.ones(past.shape[:2], dtype=mask.dtype)], 1).cumsum(1).sub(1).clamp(0),
        ).last_hidden_state[:, -codes.shape[1] :]
        loss = F.cross_entropy(model.model.generation_head(states).flatten(0, 1), codes[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(moved, 1.0)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            share = right(model, processor, texts[:PROBE])
            seconds = time.process_time() - started
            print(
                f"language {step + 1}: loss {float(loss.detach()):.3f}, wholly right {share:.3f}, {seconds:.0f} s",
                flush=True,
            )
            if share >= enough:
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
    pictures = painted(scenes)
    full = painted([replace(scene, things=crowd(number)) for number, scene in enumerate(scenes[:1000])])
    known = torch.unique(patches(torch.cat([full, pictures[:500]])), dim=0)
    assert len(known) <= CODES, f"{len(known)} kinds of patches need as many codes"
    train_codes(model, torch.cat([full, pictures[:300]]), coded(torch.cat([full, pictures[:300]]), known))
    codes = coded(pictures, known)
    with torch.no_grad():
        vq = model.model.vqmodel
        seen = vq.encode(pictures[:200]).image_tokens.view(200, -1)
        back = (vq.decode(codes[:200]) * 0.5 + 0.5).clamp(0, 1)
        shown = float(np.mean(Shapes(strict=True)(back, texts[:200])[0]))
    same = float((seen == codes[:200]).double().mean())
    print(
        f"{len(known)} kinds of patches; the encoder knows {same:.3f}, of decoded pictures {shown:.3f} are right",
        flush=True,
    )
    processor.save_pretrained(args.out)
    model.save_pretrained(args.out)
    train_language(model, processor, texts, codes, args.enough)
    half = {name: value.half() for name, value in model.state_dict().items()}
    model.save_pretrained(args.out, state_dict=half)
    print(f"{time.process_time() - started:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
