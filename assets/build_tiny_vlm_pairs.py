"""Make the embedded judge of pairs before it is taught: `tiny-vlm-tasks`, taught to say what two pictures share.

    python assets/build_tiny_vlm_pairs.py     # assets/tiny-vlm-pairs, about five minutes of one core

PaCo-Reward starts from a model that compares already; a model of this size does not, and cannot be taught to by yes
and no alone (docs/paco_grpo.md). So it first lists, of two cells of training grids, which colours and shapes both show,
or one, and how many things (`LIST`), and then says whether they are alike in one of the three (`ALIKE`). Whether they
show the same things is never asked: that is what `configs/vlm/paco_reward.yaml` teaches.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from build_tiny_vlm import learn, make_tokenizer, save
from build_tiny_vlm_tasks import PATCH
from PIL import Image
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.tasks import pairs, shapes
from genrl.vlm.policies.policy import Policy
from genrl.vlm.tasks import Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, Group

ASSETS = Path(__file__).resolve().parent
SEED = 0
STEPS, LISTS, BATCH, RATE, WARMUP = 1200, 0.4, 32, 2e-3, 30  # LISTS: share of the steps before the first `ALIKE`
EVERY, PROBE = 100, 128
LIST = "list the colours , shapes in first and second"
ALIKE = {"colours": "same colours ?", "shapes": "same shapes ?", "number": "same number ?"}
WORDS = f"{pairs.QUESTION} {LIST} {' '.join(ALIKE.values())} {' '.join((*COLOURS, *SHAPES))} none yes no".split()
MARKS = "<image>" * (shapes.PICTURE // PATCH) ** 2 * 2

Shown = tuple[Group, ...]


def listed(first: Shown, second: Shown) -> str:
    """`red both green none ... circle first ... first 2 second 3`."""

    def of(name: str) -> str:
        return next((word for word, there in where.items() if name in there), "none")

    one, other = ({word for group in shown for word in (group.colour, group.shape)} for shown in (first, second))
    where = {"both": one & other, "first": one - other, "second": other - one}
    words = [f"{name} {of(name)}" for name in (*COLOURS, *SHAPES)]
    return " ".join([*words, f"first {number(first)} second {number(second)}"])


def number(shown: Shown) -> int:
    return sum(group.count for group in shown)


def alike(what: str, first: Shown, second: Shown) -> bool:
    if what == "number":
        return number(first) == number(second)
    one, other = ({group.colour if what == "colours" else group.shape for group in s} for s in (first, second))
    return one == other


class Lessons:
    """Batches of a split; pictures are float [grids * CELLS, 3, H, W]."""

    def __init__(self, policy: Policy, split: Split) -> None:
        self.split, self.tokenizer, self.grids = split, policy.tokenizer, pairs.GRIDS[split]
        cells = [pairs.cell(split, grid, k) for grid in range(self.grids) for k in range(pairs.CELLS)]
        pictures = [Image.fromarray(cell) for cell in cells]
        self.pixels = policy.processor.image_processor(pictures, return_tensors="pt").pixel_values

    def random_cells(self, rng: np.random.Generator, what: str | None) -> list[int]:
        """Two cells, of one grid, of two of a set, or of any two. what: in which half of the pairs are to be alike."""
        wanted = bool(rng.random() < 0.5)
        while True:
            one, kind = int(rng.integers(self.grids)), rng.integers(3)
            other = [one, one ^ 1, int(rng.integers(self.grids))][kind]
            if what is None or alike(what, self.shown(one), self.shown(other)) == wanted:
                return [pairs.CELLS * grid + int(rng.integers(pairs.CELLS)) for grid in (one, other)]

    def shown(self, grid: int) -> Shown:
        return pairs.shown(self.split, grid)

    def batch(self, key: int, kind: str, size: int) -> tuple[dict[str, Tensor], Tensor]:
        """What the model reads, and its labels [B, L], -100 where nothing is learnt. kind: `list` or `alike`."""
        rng = np.random.default_rng(derive_seed("lesson", SEED, self.split, kind, key))
        chosen, asked, answers = [], [], []
        for _ in range(size):
            what = None if kind == "list" else str(rng.choice(list(ALIKE)))
            cells = self.random_cells(rng, what)
            shown = [self.shown(cell // pairs.CELLS) for cell in cells]
            answer = listed(*shown) if what is None else "yes" if alike(what, *shown) else "no"
            question = LIST if what is None else ALIKE[what]
            asked.append(self.tokenizer(f"<|user|>{MARKS}{question}<|end|><|assistant|>").input_ids)
            answers.append(self.tokenizer(f"{answer}<|end|>").input_ids)
            chosen += cells
        ids = torch.tensor([a + b for a, b in zip(asked, answers, strict=True)])  # equally long
        labels = torch.tensor([[-100] * len(a) + b for a, b in zip(asked, answers, strict=True)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": self.pixels[chosen]}, labels


@torch.no_grad()
def right(policy: Policy, lessons: Lessons) -> dict[str, float]:
    """Share of right words: of colours, shapes and numbers in lists, each given those before, and of yes and no."""
    (rows, labels), (asked, answers) = (lessons.batch(-1, kind, PROBE) for kind in ("list", "alike"))
    policy.model.eval()
    hit, said = (
        (policy.model(**some).logits[:, :-1].argmax(-1) == wanted[:, 1:]).float()
        for some, wanted in ((rows, labels), (asked, answers))
    )
    policy.model.train()
    names = hit[:, -23:-1].mean(0)[1::2]  # every other word is a name, the last one ends the list
    parts = {"colours": names[:5], "shapes": names[5:9], "numbers": names[9:], "yes or no": said[:, -2]}
    return {name: round(float(share.mean()), 3) for name, share in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-pairs")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    started = time.process_time()
    policy = Policy(str(ASSETS / "tiny-vlm-tasks"))
    known = policy.tokenizer.get_vocab()
    tokenizer = make_tokenizer([*sorted(known, key=known.__getitem__), *WORDS], policy.tokenizer.model_max_length)
    assert all(tokenizer.get_vocab()[word] == number for word, number in known.items())
    policy.model.resize_token_embeddings(len(tokenizer))
    policy.processor.tokenizer = policy.tokenizer = tokenizer
    lessons, held = Lessons(policy, "train"), Lessons(policy, "eval")
    print(f"{len(tokenizer)} words, {time.process_time() - started:.0f} s", flush=True)
    policy.model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(args.steps):
        kind = "alike" if step >= LISTS * args.steps and step % 2 else "list"
        rows, labels = lessons.batch(step, kind, BATCH)
        loss = policy.model(**rows, labels=labels).loss
        learn(policy.model, optimizer, loss, RATE * min((step + 1) / WARMUP, 1 - step / args.steps))
        if (step + 1) % EVERY == 0:
            seconds = time.process_time() - started
            print(f"step {step + 1}, {kind} {loss:.3f}, held out {right(policy, held)}, {seconds:.0f} s", flush=True)
    save(policy.processor, policy.model, args.out)


if __name__ == "__main__":
    main()
