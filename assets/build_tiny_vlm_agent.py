"""Make the embedded agent: a LLaVA of 0.5 million numbers that sees a goal, and half knows how to walk to it.

    python assets/build_tiny_vlm_agent.py     # assets/tiny-vlm-agent, about five minutes of one core

It imitates walks in training rooms (`genrl/playground/grid.py`). Its answer says where the goal is in the
picture and
what is left of the agent, before it and right of it, always rightly, then an action: a planner's with
probability `planned`, else a random one. Some lessons name MiniGrid's further actions, which it never takes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from build_tiny_vlm import learn, make_model, make_processor, make_tokenizer, save
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.grid import CELL, GOAL, VIEW, Grid
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.environments.hosts import Local
from genrl.vlm.episodes.episodes import Table

from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast  # isort: skip  # after the policy, which prepares it

ASSETS = Path(__file__).resolve().parent
SEED = 0
BATCH, WARMUP = 64, 40


class Lessons(NamedTuple):
    """steps at a rate, that falls to 0 with `cooling`; planned: share of a planner's actions; blocks in the room."""

    steps: int
    rate: float
    cooling: bool
    planned: float
    blocks: int


LESSONS = (
    # to see: with the room's own five blocks, the cell before the agent was learnt last, if at all
    Lessons(1150, 2e-3, cooling=False, planned=0.15, blocks=9),
    Lessons(80, 1e-3, cooling=True, planned=0.3, blocks=5),  # to act by what is seen, a little
)
ELSEWHERE = 0.25  # share of lessons with MiniGrid's words
LAYERS, WIDTH, LONGEST = (2, 2), 112, 128

WORDS = Grid.action_words
FURTHER = (*WORDS, "pickup", "drop", "toggle", "done")  # MiniGrid's
TEXTS = [f"{Grid.mission}\nactions: {', '.join(words)}. answer with one of them" for words in (WORDS, FURTHER)]
KINDS = ("floor", "wall", "block", "goal")
PLACES = tuple(f"{column}{row + 1}" for row in range(VIEW) for column in "abcdefg")


def thoughts(grid: Grid) -> str:
    """Where the goal is in the picture, as on a chessboard, and what is left of, before and right of the agent."""
    cells, middle = grid.view(), VIEW // 2
    goal = np.argwhere(cells == GOAL)
    place = PLACES[(VIEW - 1 - goal[0, 0]) * VIEW + goal[0, 1]] if len(goal) else "nothing"
    beside = [KINDS[cells[row, column]] for row, column in ((-1, middle - 1), (-2, middle), (-1, middle + 1))]
    return " ".join([place, *beside])


def lesson(grid: Grid, planned: float, rng: np.random.Generator) -> tuple[NDArray[np.uint8], str, str]:
    """(picture, text, answer) of a training room on a random walk."""
    while True:
        grid.reset(seed=int(rng.integers(2**31)), options={"split": "train"})
        for _ in range(int(rng.integers(6))):
            grid.step(int(rng.integers(len(WORDS))))
        if grid.pose[0] != grid.goal:
            break
    choice = grid.shortest() if rng.random() < planned else range(len(WORDS))
    return grid.seen(), TEXTS[int(rng.random() < ELSEWHERE)], f"{thoughts(grid)} {WORDS[rng.choice(choice)]}"


def encoded(tokenizer: PreTrainedTokenizerFast, some: list[tuple[NDArray[np.uint8], str, str]]) -> dict[str, Tensor]:
    """Arguments of the model, padded on the right; labels of the answers alone (-100: not learnt)."""
    asked = [tokenizer(f"<|user|>{'<image>' * VIEW**2}{text}<|end|><|assistant|>").input_ids for _, text, _ in some]
    rows = [ids + tokenizer(f"{answer}<|end|>").input_ids for ids, (_, _, answer) in zip(asked, some, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    at = torch.arange(longest)
    mask = at < torch.tensor([[len(row)] for row in rows])
    labels = ids.masked_fill((at < torch.tensor([[len(one)] for one in asked])) | ~mask, -100)
    pixels = torch.from_numpy(np.stack([picture for picture, _, _ in some])).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    return {"input_ids": ids, "attention_mask": mask.long(), "pixel_values": pixels, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-agent")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    words = [word for text in TEXTS for word in text.split()]
    tokenizer = make_tokenizer([*words, *FURTHER, *KINDS, *PLACES, "nothing"], LONGEST)
    picture = VIEW * CELL
    processor = make_processor(tokenizer, CELL, picture)
    model = make_model(tokenizer, CELL, LAYERS, WIDTH, picture)

    policy = save(processor, model, args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    settings = Settings(name="grid", answer="plain")
    table = Table(settings, Local(settings))
    table.begin({0: 0}, "train")
    grid: Grid = table.host.environments[0].env.unwrapped  # type: ignore[attr-defined]
    one, rows = policy.encode(table.prompt(0)).tokens, encoded(tokenizer, [(grid.seen(), TEXTS[0], "left")])
    assert one.ids.tolist() == rows["input_ids"][0, : len(one.ids)].tolist(), "lessons are written as prompts"
    torch.testing.assert_close(one.pixels["pixel_values"], rows["pixel_values"])
    started = time.process_time()
    for number, lessons in enumerate(LESSONS):
        teach(model, tokenizer, lessons, number)
        model = save(processor, model, args.out).model
        print(f"{time.process_time() - started:.0f} CPU seconds", flush=True)


def teach(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, lessons: Lessons, k: int) -> None:
    """The k-th part of what it is taught."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lessons.rate, betas=(0.9, 0.95), weight_decay=0.0)
    grid, shown = Grid(lessons.blocks), 0.0
    model.train()
    for step in range(lessons.steps):
        rng = np.random.default_rng(derive_seed("agent lesson", SEED + k, step))
        loss = model(**encoded(tokenizer, [lesson(grid, lessons.planned, rng) for _ in range(BATCH)])).loss
        left = (lessons.steps - step) / lessons.steps if lessons.cooling else 1.0
        learn(model, optimizer, loss, lessons.rate * min((step + 1) / WARMUP, left))
        shown += 0.1 * (float(loss.detach()) - shown)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}, loss {shown:.3f}", flush=True)
    model.eval()


if __name__ == "__main__":
    main()
