"""Make the embedded agent: a LLaVA of 0.5 million numbers that sees a goal, and half knows how to walk to it.

    python assets/build_tiny_vlm_agent.py     # assets/tiny-vlm-agent, about five minutes of one core

It imitates walks in training rooms (`genrl/vlm/agents/grid.py`). Its answer says where the goal is in the picture and
what is left of the agent, before it and right of it, always rightly, then an action: a planner's with probability
`PLANNED`, else a random one. Some lessons name MiniGrid's further actions, which it never takes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from build_tiny_vlm import make_model, make_processor, make_tokenizer
from numpy.typing import NDArray
from torch import Tensor

from genrl.config.vlm_agents import Environment as Settings
from genrl.mdp.noise import derive_seed
from genrl.vlm.agents.episodes import Table
from genrl.vlm.agents.grid import CELL, GOAL, VIEW, Grid
from genrl.vlm.agents.hosts import Local
from genrl.vlm.policy import Policy

from transformers import PreTrainedTokenizerFast  # isort: skip  # after the policy, which prepares it

ASSETS = Path(__file__).resolve().parent
SEED = 0
STEPS, BATCH, RATE, WARMUP = 1150, 64, 2e-3, 40
PLANNED, ELSEWHERE = 0.15, 0.25  # shares: of the planner's actions, of lessons with MiniGrid's words
BLOCKS = 9  # of 25 cells: with the room's own five, the one before the agent was learnt last, if at all
LAYERS, WIDTH, LONGEST = (2, 2), 112, 128

WORDS = Grid.action_words
FURTHER = (*WORDS, "pickup", "drop", "toggle", "done")  # MiniGrid's
TEXTS = [f"{Grid.mission}\nactions: {', '.join(words)}. answer with one of them" for words in (WORDS, FURTHER)]
KINDS = ("floor", "wall", "block", "goal")
PLACES = tuple(f"{column}{row + 1}" for row in range(VIEW) for column in "abcdefg")


def thoughts(grid: Grid) -> str:
    """Where the goal is in the picture, as on a chessboard, and what is left of the agent, before it and right of it."""
    cells, middle = grid.view(), VIEW // 2
    goal = np.argwhere(cells == GOAL)
    place = PLACES[(VIEW - 1 - goal[0, 0]) * VIEW + goal[0, 1]] if len(goal) else "nothing"
    beside = [KINDS[cells[row, column]] for row, column in ((-1, middle - 1), (-2, middle), (-1, middle + 1))]
    return " ".join([place, *beside])


def lesson(grid: Grid, rng: np.random.Generator) -> tuple[NDArray[np.uint8], str, str]:
    """(picture, text, answer) of a training room on a random walk."""
    while True:
        grid.reset(seed=int(rng.integers(2**31)), options={"split": "train"})
        for _ in range(int(rng.integers(6))):
            grid.step(int(rng.integers(len(WORDS))))
        if grid.pose[0] != grid.goal:
            break
    choice = grid.shortest() if rng.random() < PLANNED else range(len(WORDS))
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
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    words = [word for text in TEXTS for word in text.split()]
    tokenizer = make_tokenizer([*words, *FURTHER, *KINDS, *PLACES, "nothing"], LONGEST)
    picture = VIEW * CELL
    processor = make_processor(tokenizer, CELL, picture)
    model = make_model(tokenizer, CELL, LAYERS, WIDTH, picture)

    def save() -> Policy:
        processor.save_pretrained(args.out)
        half = {name: value.half() for name, value in model.state_dict().items()}
        model.save_pretrained(args.out, state_dict=half)
        return Policy(str(args.out))

    policy = save()
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    settings = Settings(name="grid", answer="plain")
    table = Table(settings, Local(settings))
    table.begin({0: 0}, "train")
    grid: Grid = table.host.environments[0].env.unwrapped  # type: ignore[attr-defined]
    one, rows = policy.encode(table.prompt(0)).tokens, encoded(tokenizer, [(grid.seen(), TEXTS[0], "left")])
    assert one.ids.tolist() == rows["input_ids"][0, : len(one.ids)].tolist(), "lessons are written as prompts"
    torch.testing.assert_close(one.pixels["pixel_values"], rows["pixel_values"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    crowded, started, shown = Grid(BLOCKS), time.process_time(), 0.0
    model.train()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARMUP, 1)
        rng = np.random.default_rng(derive_seed("agent lesson", SEED, step))
        loss = model(**encoded(tokenizer, [lesson(crowded, rng) for _ in range(BATCH)])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown += 0.1 * (float(loss.detach()) - shown)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}, loss {shown:.3f}, {time.process_time() - started:.0f} CPU seconds", flush=True)
    model.eval()
    save()


if __name__ == "__main__":
    main()
