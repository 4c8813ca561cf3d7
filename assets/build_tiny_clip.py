"""Make assets/tiny-clip: a CLIP of pictures and captions of the world, from nothing but drawn scenes. See README.md.

    python assets/build_tiny_clip.py                  # trains on one thread, writes assets/tiny-clip
    python assets/build_tiny_clip.py --measure only   # the figures of README.md for the one that is there

Contrastive (arXiv 2103.00020), with hard negatives on both sides: every scene has a twin picture which differs in one
thing (count, colour, shape, place), or of which one thing is spoilt, and every picture four captions that are wrong in
one thing. Two auxiliary heads on the pictures' embedding (how many of each colour and shape, and where) are thrown
away; without them a transformer takes far longer to tell shapes apart. A function of the seed and of the number of
steps, on one CPU and torch. Needs torch 2.9 or newer (`torch.optim.Muon`).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from build_tiny_models import TOKENS, learning_rate, make_tokenizer, tokenise
from score_tiny_models import sample
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from genrl.playground import shapes as world
from genrl_rewards.scorers.objects.shapes import BACKGROUND, COLOURS, PALETTE, RELATIONS, SHAPES, Group, Shapes
from genrl_rewards.scorers.preference.clipscore import ClipScore

ASSETS = Path(__file__).resolve().parent
SEED = 0
SCENES = 16_000
BATCH = 32  # scenes; twice as many pictures
WRONG_CAPTIONS = 4  # per picture
WORD_SHARE = 0.1
SPOILT_SHARE = 0.3  # of the twins
WIDTH, LAYERS, HEADS, PATCH = 96, 4, 3, 8
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
Description = tuple[tuple[Group, ...], str | None]


# --- data ------------------------------------------------------------------------------------------------------


@dataclass
class Pictures:
    """N pictures: scene i is at 2 i, its twin at 2 i + 1."""

    pixels: Tensor
    """uint8 [N, 3, 64, 64]."""
    captions: Tensor
    """Tokens [N, L]; of a spoilt picture: of nothing."""
    captioned: Tensor
    """bool [N]: False where a thing is spoilt, so that no caption fits."""
    text: Tensor
    """int64 [N]: equal where the captions are."""
    wrong: Tensor
    """Tokens of captions that are wrong in one thing, [N, WRONG_CAPTIONS, L]."""
    counts: Tensor
    """int64 [N, kinds]: how many things of each kind (colour and shape)."""
    places: Tensor
    """[N, kinds, 2]: their mean centre, as a part of the picture; 0 where there are none."""


def alter(rng: np.random.Generator, description: Description) -> Description:
    """The same but for one thing: a number, a colour, a shape, the relation, or who has which colour."""
    groups, relation = description
    while True:
        changed, to = list(groups), relation
        which, what = int(rng.integers(len(groups))), rng.integers(5)
        group = changed[which]
        if what == 0:
            changed[which] = replace(group, count=int(rng.integers(1, 5)))
        elif what == 1:
            changed[which] = replace(group, colour=COLOURS[rng.integers(len(COLOURS))])
        elif what == 2:
            changed[which] = replace(group, shape=SHAPES[rng.integers(len(SHAPES))])
        elif what == 3 and relation is not None:
            to = RELATIONS[rng.integers(len(RELATIONS))]
        elif len(groups) == 2:
            first, second = groups
            changed = [replace(first, colour=second.colour), replace(second, colour=first.colour)]
        if relation is not None and any(g.count > 1 for g in changed):
            to = None  # captions with a relation are of one thing and one thing
        kinds = {(g.colour, g.shape) for g in changed}
        same = {(g.count, g.colour, g.shape) for g in changed} == {(g.count, g.colour, g.shape) for g in groups}
        if len(kinds) == len(changed) and sum(g.count for g in changed) <= 4 and not (same and to == relation):
            return tuple(changed), to


def spoil(rng: np.random.Generator, picture: np.ndarray, thing: world.Thing) -> np.ndarray:
    """The picture with one thing cut in two, half of another colour, or without a shape."""
    y, x = np.mgrid[: world.SIZE, : world.SIZE] + 0.5
    dx, dy = x - thing.x, y - thing.y
    near, turn = np.hypot(dx, dy) < 1.3 * thing.radius + 1, rng.uniform(0, 2 * np.pi)
    half = near & (np.cos(turn) * dx + np.sin(turn) * dy > rng.uniform(-0.2, 0.4) * thing.radius)
    other = PALETTE[[colour for colour in COLOURS if colour != thing.colour][rng.integers(len(COLOURS) - 1)]]
    out, what = picture.copy(), rng.integers(3)
    if what == 0:
        out[half] = BACKGROUND
    elif what == 1:
        painted = np.abs(picture.astype(int) - PALETTE[thing.colour]).sum(-1) < 60
        out[half & painted] = other
    else:
        angle, phases = np.arctan2(dy, dx), rng.uniform(0, 2 * np.pi, 3)
        waves = sum(a * np.sin(k * angle + p) for a, k, p in zip((0.3, 0.2, 0.15), (2, 3, 5), phases, strict=True))
        out[near] = BACKGROUND
        out[near & (np.hypot(dx, dy) < thing.radius * (0.8 + waves))] = PALETTE[thing.colour]
    return out


def draw_pictures(tokenizer: CLIPTokenizer, number: int, rng: np.random.Generator) -> Pictures:
    """Pictures of `number` scenes and their twins."""
    pixels, texts, wrong, counts, places = [], [], [], [], []
    for _ in range(number):
        scene = world.sample_scene(rng, split="all", word_share=WORD_SHARE)
        for twin in (False, True):
            spoilt = None
            if scene.sign is not None:
                if twin:
                    scene = world.sample_scene(rng, kind="word", split="all")
                others = [world.sample_scene(rng, kind="word", split="all") for _ in range(WRONG_CAPTIONS)]
                pixels.append(world.draw(scene))
                texts.append(world.caption(scene))
                wrong += [world.caption(other) for other in others]
            else:
                description: Description = (scene.groups, scene.relation)
                if twin and rng.random() < SPOILT_SHARE:
                    spoilt = int(rng.integers(len(scene.things)))
                elif twin:
                    description = alter(rng, description)
                    scene = world.Scene("two", world.place(rng, *description), *description)
                pixels.append(world.draw(scene))
                texts.append(world.caption(scene))
                wrong += [caption_of(alter(rng, description)) for _ in range(WRONG_CAPTIONS)]
                if spoilt is not None:
                    pixels[-1] = spoil(rng, pixels[-1], scene.things[spoilt])
                    texts[-1] = ""
            count, place = np.zeros(len(KINDS), int), np.zeros((len(KINDS), 2))
            for i, thing in enumerate(scene.things):
                if i != spoilt:
                    count[KINDS.index((thing.colour, thing.shape))] += 1
                    place[KINDS.index((thing.colour, thing.shape))] += (thing.x / world.SIZE, thing.y / world.SIZE)
            counts.append(count)
            places.append(place / np.maximum(count, 1)[:, None])
    numbers = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return Pictures(
        torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous(),
        tokenise(tokenizer, texts),
        torch.tensor([text != "" for text in texts]),
        torch.tensor([numbers[text] for text in texts]),
        tokenise(tokenizer, wrong).unflatten(0, (-1, WRONG_CAPTIONS)),
        torch.from_numpy(np.stack(counts)),
        torch.from_numpy(np.stack(places)).float(),
    )


def caption_of(description: Description) -> str:
    return world.caption(world.Scene("two", (), *description))


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures in [0, 1] as a model may draw them: moved, blurred, of other contrast, with noise."""
    images, n = pixels.float() / 255, len(pixels)
    shift = torch.randint(-3, 4, (2,), generator=generator).tolist()
    images = images.roll(shift, dims=(2, 3))
    blurred = F.interpolate(F.avg_pool2d(images, 2), scale_factor=2, mode="bilinear")
    images = torch.lerp(images, blurred, torch.rand(n, 1, 1, 1, generator=generator))
    contrast = 1 + 0.1 * torch.randn(n, 3, 1, 1, generator=generator)
    images = 1 - (1 - images) * contrast
    noise = 0.06 * torch.rand(n, 1, 1, 1, generator=generator) * torch.randn(images.shape, generator=generator)
    return (images + noise).clamp(0, 1)


# --- the model -------------------------------------------------------------------------------------------------


def make_clip(tokenizer: CLIPTokenizer) -> CLIPModel:
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    config = CLIPConfig(
        text_config={**text, **special, "vocab_size": len(tokenizer), "max_position_embeddings": TOKENS},
        vision_config={**vision, "num_attention_heads": HEADS, "image_size": world.SIZE, "patch_size": PATCH},
        projection_dim=64,
        logit_scale_init_value=math.log(10.0),
    )
    model = CLIPModel(config)
    for name, parameter in model.named_parameters():
        if "token_embedding" in name:
            nn.init.normal_(parameter, std=0.3)
        elif "position_embedding" in name:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 2 and "embeddings" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def normalise(images: Tensor) -> Tensor:
    return (images - 0.5) / 0.5


def embed_texts(model: CLIPModel, ids: Tensor, eos: int) -> Tensor:
    """Normalised embeddings of captions [N, L] padded with the end token, [N, D]."""
    ends = (ids == eos).int().argmax(1, keepdim=True)
    mask = (torch.arange(ids.shape[1]) <= ends).long()
    return F.normalize(model.get_text_features(ids, mask).pooler_output, dim=-1)


def contrastive_loss(images: Tensor, texts: Tensor, wrong: Tensor, batch: Pictures, scale: Tensor) -> Tensor:
    """Cross-entropy of caption by picture and of picture by caption; embeddings [N, D], wrong [N, W, D]."""
    logits = scale * images @ texts.T
    equal = (batch.text[:, None] == batch.text) & ~torch.eye(len(images), dtype=torch.bool)
    logits = logits.masked_fill(equal, -torch.inf)
    target, own = torch.arange(len(images)), batch.captioned
    by_picture = torch.cat([logits.masked_fill(~own, -torch.inf), scale * torch.einsum("nd,nwd->nw", images, wrong)], 1)
    return F.cross_entropy(by_picture[own], target[own]) + F.cross_entropy(logits.T[own], target[own])


def train(
    steps: int, tokenizer: CLIPTokenizer, draw: Callable[..., Pictures], muon: Callable[..., torch.optim.Optimizer]
) -> CLIPModel:
    """A model of `SCENES` scenes as `draw(tokenizer, number, rng)` makes them; `muon` moves the matrices."""
    torch.manual_seed(SEED)
    started = time.process_time()
    data = draw(tokenizer, SCENES, np.random.default_rng([SEED, 7]))
    print(f"{len(data.pixels)} pictures in {time.process_time() - started:.0f} s", flush=True)
    model, kinds = make_clip(tokenizer).train(), data.counts.shape[1]
    count_head, place_head = nn.Linear(64, 5 * kinds), nn.Linear(64, 2 * kinds)
    modules = nn.ModuleList([model, count_head, place_head])
    named = list(model.named_parameters())
    matrices = [p for n, p in named if "encoder.layers" in n and p.ndim == 2]
    rest = [p for p in modules.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        muon(matrices, lr=0.02),
        torch.optim.AdamW(rest, lr=1.5e-3, betas=(0.9, 0.98)),
    ]
    rates = [0.02, 1.5e-3]
    averaged = [p.detach().clone() for p in model.parameters()]
    started, recent = time.process_time(), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate(step, steps, 0.5)
            optimizer.zero_grad()
        first = 2 * torch.randint(SCENES, (BATCH,), generator=generator)
        rows = torch.stack([first, first + 1], 1).flatten()
        batch = Pictures(*(getattr(data, name)[rows] for name in Pictures.__dataclass_fields__))
        pixels = normalise(augment(batch.pixels, generator))
        images = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
        ids = torch.cat([batch.captions, batch.wrong.flatten(0, 1)])
        texts, wrong = embed_texts(model, ids, tokenizer.eos_token_id).split([len(rows), ids.shape[0] - len(rows)])
        wrong = wrong.unflatten(0, (len(rows), -1))
        contrastive = contrastive_loss(images, texts, wrong, batch, model.logit_scale.exp())
        counted = F.cross_entropy(8 * count_head(images).view(-1, 5), batch.counts.flatten())
        there = batch.counts > 0
        placed = F.mse_loss(place_head(images).view(len(rows), -1, 2)[there], batch.places[there])
        (contrastive + 10 * counted + 10 * placed).backward()
        nn.utils.clip_grad_norm_(list(modules.parameters()), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(30.0))
            decay = min(0.995, (step + 1) / (step + 10))
            torch._foreach_lerp_(averaged, [p.detach() for p in model.parameters()], 1 - decay)
        recent.append([contrastive.item(), counted.item(), placed.item()])
        if (step + 1) % 100 == 0 or step + 1 == steps:
            means = " ".join(f"{value:.4f}" for value in np.mean(recent[-100:], 0))
            scale = float(model.logit_scale.exp())
            print(f"step {step + 1}/{steps} loss {means} scale {scale:.1f} cpu {time.process_time() - started:.0f} s",
                  flush=True)  # fmt: skip
    torch._foreach_copy_([p.data for p in model.parameters()], averaged)
    return model.eval()


def save(model: CLIPModel, folder: Path) -> None:
    model.half().save_pretrained(folder)
    size = {"height": world.SIZE, "width": world.SIZE}
    CLIPImageProcessorPil(
        size={"shortest_edge": world.SIZE}, crop_size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(folder)


# --- figures ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(folder: Path) -> None:
    """Print how well the scorer tells right from wrong, on new scenes and on pictures of assets/tiny-t2i."""
    judge = ClipScore(str(folder))
    rng = np.random.default_rng([SEED, 8])
    scenes = [world.sample_scene(rng, split="all", word_share=0) for _ in range(400)]
    pictures = torch.from_numpy(np.stack([world.draw(s) for s in scenes])).permute(0, 3, 1, 2).float() / 255
    captions = [world.caption(scene) for scene in scenes]
    images = F.normalize(judge.scorer.embed_images(pictures), dim=-1)
    texts = F.normalize(judge.scorer.embed_texts(captions), dim=-1)
    table = images @ texts.T
    right = table.diagonal()
    best = table.argmax(1)
    share = np.mean([captions[int(best[i])] == captions[i] for i in range(len(scenes))])
    best = table.argmax(0)
    shown = np.mean([captions[int(best[i])] == captions[i] for i in range(len(scenes))])
    print(f"of 400 captions the picture's own is the nearest: {share:.3f}; of 400 pictures the caption's: {shown:.3f}")
    wrong = [caption_of(alter(rng, (scene.groups, scene.relation))) for scene in scenes]
    beaten = right > (images * F.normalize(judge.scorer.embed_texts(wrong), dim=-1)).sum(-1)
    print(f"own caption before one that is wrong in one thing: {beaten.float().mean():.3f}")
    spoilt = []
    for picture, scene in zip(pictures, scenes, strict=True):
        array = (picture * 255).round().byte().permute(1, 2, 0).numpy()
        spoilt.append(spoil(rng, array, scene.things[rng.integers(len(scene.things))]))
    images = F.normalize(
        judge.scorer.embed_images(torch.from_numpy(np.stack(spoilt)).permute(0, 3, 1, 2) / 255), dim=-1
    )
    print(f"the picture before itself with one thing spoilt: {(right > (images * texts).sum(-1)).float().mean():.3f}")
    print(f"cosine, right {right.mean():.3f} wrong {table[~torch.eye(400, dtype=torch.bool)].mean():.3f}")

    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(ASSETS / "tiny-t2i")
    pipeline.set_progress_bar_config(disable=True)
    prompts = [prompt for prompt in world.shapes_prompts("eval")[:48] for _ in range(8)]
    call = {"guidance_scale": 1.0, "num_inference_steps": 8, "max_sequence_length": 2}
    made = sample(pipeline, prompts, call).clamp(0, 1)
    values, parts = Shapes()(made, prompts)
    rule, scores = np.array(values).reshape(48, 8), judge(made, prompts).double().numpy().reshape(48, 8)
    print(f"generated: cosine {scores.mean():.3f}, std {scores.std():.3f}, within a prompt {scores.std(1).mean():.3f}")
    print(f"generated: right by the rule {scores.flatten()[np.array(parts['strict']) == 1].mean():.3f}, others "
          f"{scores.flatten()[np.array(parts['strict']) < 1].mean():.3f}")  # fmt: skip
    print_agreement(rule, scores)


def print_agreement(rule: np.ndarray, scores: np.ndarray) -> None:
    """How a scorer's values agree with a rule's, both [prompts, pictures of each]."""
    within = [np.corrcoef(a, b)[0, 1] for a, b in zip(rule, scores, strict=True) if a.std() > 0]
    print(f"generated: correlation with the rule {np.corrcoef(rule.flatten(), scores.flatten())[0, 1]:.2f}, "
          f"within a prompt {np.mean(within):.2f} (mean of {len(within)})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--measure", choices=("after", "only"), default="after")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if args.measure == "after":
        muon = partial(torch.optim.Muon, weight_decay=0.0)
        model = train(args.steps, make_tokenizer(ASSETS / "tiny-clip"), draw_pictures, muon)
        save(model, ASSETS / "tiny-clip")
    measure(ASSETS / "tiny-clip")


if __name__ == "__main__":
    main()
