"""Make the embedded vision-language model of the further tasks: as `build_tiny_vlm.py`, of 0.5 million numbers.

    python assets/build_tiny_vlm_tasks.py     # assets/tiny-vlm-tasks, about six minutes of one core

It is taught by the training questions of `genrl/playground/tasks`. Of the answers to the tasks that reinforcement is to
teach (`WEAK`) two in five are another question's, so it learns what an answer looks like and weakly which one is right.
The others are always right and teach it to see: colours in every cell, what a picture shows, how high a series is, what
was done to a picture, colours of frames, and which shape one frame shows. That last one makes it the frozen answerer of
the key-frame task, too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from build_tiny_vlm import colours_of, learn, make_model, make_processor, make_tokenizer, save
from PIL import Image, ImageDraw

from genrl.config import plugins
from genrl.mdp.noise import derive_seed
from genrl.playground.shapes import SIZE, caption, draw
from genrl.playground.tasks import pairs, series, shapes
from genrl.vlm import tasks
from genrl.vlm.config.names import TASKS
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.policies.policy import Policy
from genrl.vlm.tasks import Split
from genrl_rewards.scorers.objects.shapes import find
from genrl_rewards.scorers.texts.verifiable import exact

from transformers import LlavaProcessor  # isort: skip  # after the policy

ASSETS = Path(__file__).resolve().parent
SEED = 0
POOL, BATCH, RATE, WARMUP, STEPS = 40_000, 32, 2e-3, 50, 4000
PATCH, LAYERS, WIDTH, LONGEST = 12, (2, 3), 96, 160
WRONG, UNTAGGED = 0.4, 0.1  # shares of the answers to `WEAK`
WEAK = {
    "jigsaw": 4, "jigsaw_pair": 3, "box": 10, "point": 4, "quality": 8, "better": 3, "series": 4, "key_frames": 16,
    "scenes": 3, "sums": 2,
}  # fmt: skip
SURE = {"cells": 8, "describe": 4, "what": 10, "heights": 4, "harm": 4, "frames": 8}
"""Lessons by their shares, in parts of the whole."""
DESCRIBE = "describe such a picture ."


def lesson(name: str, number: int) -> tuple[list[Image.Image], str, str]:
    """(pictures, question, right answer) of this task and number, of the training split."""
    rng = np.random.default_rng(derive_seed("lesson", SEED, name, number))
    if name == "cells":
        scene, _, _ = shapes.QUESTIONS["count"](rng, "train")
        return [Image.fromarray(draw(scene, shapes.PICTURE))], "list the colours in every cell .", colours_of(scene)
    if name == "describe":
        scene = pairs.scene(rng, "train")
        return [Image.fromarray(draw(scene, SIZE))], DESCRIBE, caption(scene)
    if name == "harm":
        asked = shapes.rated(rng, "train")
        return [asked.parts[0]], "what was done to this picture ?", asked.columns["harm"]
    if name == "heights":
        (plot, _) = series.which(rng, "train").parts
        lowest = np.array(plot.convert("L"))[:, 4::8].argmin(0)  # where the line is, every eighth column
        return [plot], "list the heights of this series .", " ".join(str(9 - 10 * y // shapes.PICTURE) for y in lowest)
    if name == "frames":
        *frames, _ = shapes.keys(rng, "train").parts
        seen = [find(np.array(frame))[0].colour for frame in frames]
        return frames, "list the colours of the frames .", " ".join(seen)
    asked = plugins.find(name, TASKS)(rng, "train")
    (question,) = [part for part in asked.parts if isinstance(part, str)]
    return [part for part in asked.parts if not isinstance(part, str)], question, asked.answer


def taught(name: str, number: int) -> list[tuple[list[Image.Image], str, str]]:
    """So many lessons, each with what is told as its answer."""
    rng = np.random.default_rng(derive_seed("taught", SEED, name))
    lessons = [lesson(name, k) for k in range(number)]
    rows = []
    for pictures, question, answer in lessons:
        if name in WEAK and rng.random() < WRONG:
            answer = lessons[rng.integers(number)][2]
        bare = name in WEAK and rng.random() < UNTAGGED
        text = answer if bare else f"<think> i see {answer} </think> <answer> {answer} </answer>"
        rows.append((pictures, question, text))
    return rows


class Bucket:
    """Lessons with equally many pictures: pixels [N * pictures, 3, H, W] as bytes, ids and labels [N, L]."""

    def __init__(self, processor: LlavaProcessor, rows: list[tuple[list[Image.Image], str, str]]) -> None:
        tokenizer, self.pictures = processor.tokenizer, len(rows[0][0])
        marks = "<image>" * (shapes.PICTURE // PATCH) ** 2 * self.pictures
        asked = [tokenizer(f"<|user|>{marks}{question}<|end|><|assistant|>").input_ids for _, question, _ in rows]
        answered = [tokenizer(f"{answer}<|end|>").input_ids for _, _, answer in rows]
        longest = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True))
        pad = [[tokenizer.pad_token_id] * (longest - len(a) - len(b)) for a, b in zip(asked, answered, strict=True)]
        self.ids = torch.tensor([a + b + p for a, b, p in zip(asked, answered, pad, strict=True)])
        labels = [[-100] * len(a) + b + [-100] * len(p) for a, b, p in zip(asked, answered, pad, strict=True)]
        self.labels = torch.tensor(labels)
        flat = [picture for pictures, _, _ in rows for picture in pictures]
        self.pixels = processor.image_processor(flat, return_tensors="pt").pixel_values if flat else None

    def batch(self, generator: torch.Generator, pad: int) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(self.ids), (BATCH,), generator=generator)
        ids = self.ids[chosen]
        rows = {"input_ids": ids, "attention_mask": (ids != pad).long(), "labels": self.labels[chosen]}
        if self.pixels is not None:
            at = (chosen[:, None] * self.pictures + torch.arange(self.pictures)).flatten()
            rows["pixel_values"] = self.pixels[at]
        return rows


def right(policy: Policy, split: Split, number: int) -> dict[str, float]:
    """Share of right greedy answers to each kind of question, exactly as expected."""
    shares = {}
    for name in [*WEAK, "what"]:
        rows = [tasks.row(name, split, k) for k in range(number)]
        prompts = [policy.encode(row.prompt) for row in rows]
        answers = generate(policy, prompts, 1, Sampling(16, temperature=0), [(0, k) for k in range(number)])
        shares[name] = round(float(np.mean(exact(answers.texts, [row.columns["answer"] for row in rows]))), 3)
    return shares


def sheet(path: Path) -> None:
    """Examples of every task with pictures, drawn from the training split: docs/img/vlm_tasks.png."""
    names = ["jigsaw", "jigsaw_pair", "box", "quality", "better", "series", "key_frames", "scenes"]
    width, gap, line = 760, 14, 92
    canvas = Image.new("RGB", (width, line * len(names)), "white")
    pen = ImageDraw.Draw(canvas)
    for place, name in enumerate(names):
        left, top, number = 6, line * place, 0
        while True:
            pictures, question, answer = lesson(name, number)
            if left + 50 * len(pictures) > width:
                break
            if not number:
                pen.text((left, top + 2), f"{name}: {question}"[:124], fill="black")
            for k, picture in enumerate(pictures):
                canvas.paste(picture.resize((shapes.PICTURE, shapes.PICTURE)), (left + 50 * k, top + 18))
            pen.text((left, top + 70), answer, fill="black")
            left, number = left + 50 * len(pictures) + gap, number + 1
    canvas.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-tasks")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sheet", type=Path, help="draw examples of the tasks into this file, and leave")
    args = parser.parse_args()
    if args.sheet:
        return sheet(args.sheet)
    torch.manual_seed(SEED)
    started, shares = time.process_time(), WEAK | SURE
    lessons = {name: taught(name, POOL * share // sum(shares.values())) for name, share in shares.items()}
    words = {word for rows in lessons.values() for _, *texts in rows for text in texts for word in text.split()}
    tokenizer = make_tokenizer(sorted(words | {*map(str, range(19))}), LONGEST)
    processor, model = make_processor(tokenizer, PATCH), make_model(tokenizer, PATCH, LAYERS, WIDTH)

    save(processor, model, args.out)
    rows: dict[int, list[tuple[list[Image.Image], str, str]]] = {}
    for one in (one for some in lessons.values() for one in some):
        rows.setdefault(len(one[0]), []).append(one)
    buckets = {pictures: Bucket(processor, some) for pictures, some in rows.items()}
    weight = torch.tensor([float(len(some)) for some in rows.values()])
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} numbers, {len(tokenizer)} words, {time.process_time() - started:.0f} s", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        bucket = list(buckets.values())[int(torch.multinomial(weight, 1, generator=generator))]
        loss = model(**bucket.batch(generator, tokenizer.pad_token_id)).loss
        learn(model, optimizer, loss, RATE * min((step + 1) / WARMUP, 1 - step / args.steps))
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}, loss {loss:.3f}, {time.process_time() - started:.0f} s", flush=True)
    policy = save(processor, model, args.out)
    print(f"train: {right(policy, 'train', 96)}", flush=True)
    print(f"held out: {right(policy, 'eval', 96)}, {time.process_time() - started:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
