"""Make assets/tiny-emoji-clip: a CLIP of pictures and captions of the world of emoji. See README.md.

    python assets/build_tiny_emoji_clip.py                  # trains on one thread, writes assets/tiny-emoji-clip
    python assets/build_tiny_emoji_clip.py --measure only   # the figures of README.md for the one that is there

Model and training are those of `build_tiny_clip.py`; here are the pictures, their twins and the wrong captions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from build_tiny_clip import ASSETS, SEED, WRONG_CAPTIONS, Pictures, print_agreement, save, train
from build_tiny_emoji import Muon
from build_tiny_models import make_tokenizer, tokenise
from score_tiny_models import sample
from torch import Tensor
from transformers import CLIPTokenizer

from genrl.playground import emoji as world
from genrl_rewards.scorers.objects.emoji import BACKGROUND, GLYPH, OBJECTS, Emoji, Group, glyph
from genrl_rewards.scorers.preference.clipscore import ClipScore

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SPOILT_SHARE = 0.3  # of the twins
HELD_OUT_SHARE = 0.2  # of the scenes: a scorer has to know what the model has not seen
Description = tuple[tuple[Group, ...], str | None]


def meaning(description: Description) -> object:
    """Equal where two descriptions say the same: order matters to a relation alone."""
    groups, relation = description
    parts = [(group.count, group.name) for group in groups]
    return (tuple(parts), relation) if relation else frozenset(parts)


def alter(rng: np.random.Generator, description: Description) -> Description:
    """The same but for one thing: a number, a kind of thing, the relation, or which of two things is which."""
    groups, relation = description
    while True:
        changed, to = list(groups), relation
        which, what = int(rng.integers(len(groups))), rng.integers(4)
        if what == 0:
            changed[which] = replace(changed[which], count=int(rng.integers(1, 3 if relation else 5)))
        elif what == 1:
            changed[which] = replace(changed[which], name=OBJECTS[rng.integers(len(OBJECTS))])
        elif what == 2 and relation:
            to = OPPOSITE[relation]
        elif len(groups) > 1:
            other = (which + 1) % len(groups)
            names = changed[which].name, changed[other].name
            changed[which], changed[other] = (
                replace(changed[which], name=names[1]),
                replace(changed[other], name=names[0]),
            )
        distinct = len({group.name for group in changed}) == len(changed)
        altered: Description = (tuple(changed), to)
        if distinct and sum(group.count for group in changed) <= 4 and meaning(altered) != meaning(description):
            return altered


def spoil(rng: np.random.Generator, picture: np.ndarray, thing: world.Thing) -> np.ndarray:
    """The picture with one thing cut, half another, or its outline alone."""
    out, own = picture.copy(), glyph(thing.name)
    area = out[thing.y : thing.y + GLYPH, thing.x : thing.x + GLYPH]
    half = (slice(None), slice(GLYPH // 2)) if rng.random() < 0.5 else (slice(GLYPH // 2), slice(None))
    what = rng.integers(3)
    if what == 0:
        area[half] = BACKGROUND
    elif what == 1:
        area[half] = glyph(OBJECTS[rng.integers(len(OBJECTS))])[half]
    else:
        painted = np.abs(own.astype(int) - BACKGROUND).sum(-1) > 30
        area[painted] = own[painted].mean(0)
    return out


def sample_scene(rng: np.random.Generator) -> world.Scene:
    return world.sample_scene(rng, split="eval" if rng.random() < HELD_OUT_SHARE else "train")


def draw_pictures(tokenizer: CLIPTokenizer, number: int, rng: np.random.Generator) -> Pictures:
    """Pictures of `number` scenes and their twins, which differ in one thing or have one thing spoilt."""
    pixels, texts, wrong = [], [], []
    counts, places = np.zeros((2 * number, len(OBJECTS)), int), np.zeros((2 * number, len(OBJECTS), 2))
    scene = sample_scene(rng)
    for row in range(2 * number):
        spoilt = None
        if row % 2 == 0:
            scene = sample_scene(rng)
        elif rng.random() < SPOILT_SHARE:
            spoilt = int(rng.integers(len(scene.things)))
        else:
            groups, relation = alter(rng, (scene.groups, scene.relation))
            scene = world.Scene(world.place(rng, groups, relation), groups, relation)
        picture = world.draw(scene)
        pixels.append(picture if spoilt is None else spoil(rng, picture, scene.things[spoilt]))
        texts.append(world.caption(scene) if spoilt is None else "")
        wrong += wrong_captions(rng, scene, WRONG_CAPTIONS)
        for thing in (thing for i, thing in enumerate(scene.things) if i != spoilt):
            counts[row, OBJECTS.index(thing.name)] += 1
            places[row, OBJECTS.index(thing.name)] += (thing.x / world.PICTURE, thing.y / world.PICTURE)
    numbers = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return Pictures(
        tensor_of(pixels),
        tokenise(tokenizer, texts),
        torch.tensor([text != "" for text in texts]),
        torch.tensor([numbers[text] for text in texts]),
        tokenise(tokenizer, wrong).unflatten(0, (-1, WRONG_CAPTIONS)),
        torch.from_numpy(counts),
        torch.from_numpy(places / np.maximum(counts, 1)[..., None]).float(),
    )


def wrong_captions(rng: np.random.Generator, scene: world.Scene, number: int) -> list[str]:
    return [world.caption_of(*alter(rng, (scene.groups, scene.relation))) for _ in range(number)]


def tensor_of(pictures: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def fooled(judge: ClipScore, captions: list[str], steps: int, size: float) -> Tensor:
    """Cosines [N] of pictures that show nothing but noise of at most `size`, found by so many ascents of the cosine."""
    blank = torch.from_numpy(np.broadcast_to(np.array(BACKGROUND), (64, 64, 3)) / 255).permute(2, 0, 1).float()
    noise = torch.zeros(len(captions), *blank.shape, requires_grad=True)
    for _ in range(steps):
        (slope,) = torch.autograd.grad(judge((blank + noise).clamp(0, 1), captions).sum(), noise)
        noise = (noise + 2 * size / steps * slope.sign()).clamp(-size, size).detach().requires_grad_()
    return judge((blank + noise).clamp(0, 1).detach(), captions).detach()


def measure(folder: str) -> None:
    """Print how well the scorer tells right from wrong, on new scenes and on pictures of assets/tiny-emoji."""
    judge, rng = ClipScore(folder), np.random.default_rng([SEED, 8])
    scenes = [sample_scene(rng) for _ in range(400)]
    arrays = [world.draw(scene) for scene in scenes]
    pictures, captions = tensor_of(arrays).float() / 255, [world.caption(scene) for scene in scenes]
    spoilt = [spoil(rng, p, s.things[rng.integers(len(s.things))]) for p, s in zip(arrays, scenes, strict=True)]
    wrong = [wrong_captions(rng, scene, 1)[0] for scene in scenes]
    with torch.no_grad():
        images = F.normalize(judge.scorer.embed_images(pictures), dim=-1)
        table = images @ F.normalize(judge.scorer.embed_texts(captions), dim=-1).T
        right = table.diagonal()
        beaten = right > judge(pictures, wrong)
        whole = right > judge(tensor_of(spoilt).float() / 255, captions)
    nearest = [np.mean([captions[int(i)] == c for i, c in zip(table.argmax(d), captions, strict=True)]) for d in (1, 0)]
    print(f"own caption nearest of 400: {nearest[0]:.3f}; own picture: {nearest[1]:.3f}")
    print(f"own caption before one that is wrong in one thing: {beaten.float().mean():.3f}")
    print(f"the picture before itself with one thing spoilt: {whole.float().mean():.3f}")
    print(f"cosine, right {right.mean():.3f} wrong {table[~torch.eye(400, dtype=torch.bool)].mean():.3f}")
    for size in (4, 16):
        print(f"nothing but noise of {size}/255: cosine {fooled(judge, captions[:64], 40, size / 255).mean():.3f}")

    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(ASSETS / "tiny-emoji")
    pipeline.set_progress_bar_config(disable=True)
    prompts = [prompt for prompt in world.prompts("eval", 160)[:48] for _ in range(8)]
    made = sample(pipeline, prompts, {"guidance_scale": 4.0, "num_inference_steps": 8, "max_sequence_length": 2})
    soft, parts = Emoji()(made.clamp(0, 1), prompts)
    with torch.no_grad():
        scores = judge(made.clamp(0, 1), prompts).double().numpy()
    strict = np.array(parts["strict"]) == 1
    print(f"generated: cosine {scores[strict].mean():.3f} where right by the rule ({strict.sum()}), else "
          f"{scores[~strict].mean():.3f}")  # fmt: skip
    print_agreement(np.array(soft).reshape(48, 8), scores.reshape(48, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--measure", choices=("after", "only"), default="after")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = ASSETS / "tiny-emoji-clip"
    if args.measure == "after":
        save(train(args.steps, make_tokenizer(folder, world.WORDS), draw_pictures, Muon), folder)
    measure(str(folder))


if __name__ == "__main__":
    main()
