"""Make the embedded vision-language model of the emoji questions: a LLaVA of 0.9 million numbers.

    python assets/build_tiny_vlm_emoji.py     # assets/tiny-vlm-emoji, about seven minutes of one core

As `build_tiny_vlm.py`: it is taught by the training questions of `genrl/vlm/tasks/emoji.py`. Two in five answers to
them are another question's of the same kind, and one in ten has no tags, so it learns what an answer looks like and
weakly which one is right. What lies in every cell, and of which kind it is, is always told rightly: that teaches it
to see.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from build_tiny_vlm import make_model, make_processor, make_tokenizer, save
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.vlm import tasks
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.policies.policy import Policy
from genrl.vlm.tasks import emoji
from genrl.vlm.tasks.rows import Split
from rewards.scorers.texts.verifiable import exact

from transformers import LlavaProcessor  # isort: skip  # after the policy

ASSETS = Path(__file__).resolve().parent
SEED = 0
POOL, BATCH, RATE, WARMUP, STEPS = 24_000, 48, 2e-3, 50, 3000
LAYERS, WIDTH, LONGEST = (2, 2), 128, 64
WRONG, UNTAGGED = 0.4, 0.1  # shares of the answers to questions
SHARES = {"things": 0.4, "kinds": 0.15, "category": 0.1, "count": 0.15, "place": 0.1, "combination": 0.1}
THINGS, KINDS = "list the things in every cell .", "list the kinds in every cell ."

Lesson = tuple[np.ndarray, str, str]


def lesson(name: str, number: int) -> Lesson:
    """(picture, question, right answer) of this number, of the training split."""
    rng = np.random.default_rng(derive_seed("emoji lesson", SEED, name, number))
    asks = emoji.ASKS[name if name in emoji.ASKS else tuple(emoji.ASKS)[rng.integers(len(emoji.ASKS))]]
    cells, question, answer, _ = asks(rng, "train")
    if name not in emoji.ASKS:
        found = [cells.get(cell) for cell in range(emoji.CELLS**2)]
        words = [(emoji.NAMES[k] if name == "things" else emoji.KINDS[k // emoji.EACH]) if k is not None else "none"
                 for k in found]  # fmt: skip
        question, answer = THINGS if name == "things" else KINDS, " ".join(words)
    return np.array(emoji.picture(rng, cells)), question, answer


def taught() -> list[Lesson]:
    """All lessons, each with what is told as its answer."""
    rows = []
    for name, share in SHARES.items():
        rng = np.random.default_rng(derive_seed("emoji taught", SEED, name))
        lessons = [lesson(name, k) for k in range(int(POOL * share))]
        for picture, question, answer in lessons:
            asked = name in emoji.ASKS
            if asked and rng.random() < WRONG:
                answer = lessons[rng.integers(len(lessons))][2]
            bare = asked and rng.random() < UNTAGGED
            told = answer if bare or not asked else f"<think> i see {answer} </think> <answer> {answer} </answer>"
            rows.append((picture, question, told))
    return rows


def encoded(processor: LlavaProcessor, lessons: list[Lesson]) -> tuple[Tensor, Tensor]:
    """Ids and labels [N, L] (-100: not learnt)."""
    tokenizer, marks = processor.tokenizer, "<image>" * emoji.CELLS**2
    asked = [tokenizer(f"<|user|>{marks}{question}<|end|><|assistant|>").input_ids for _, question, _ in lessons]
    rows = [a + tokenizer(f"{answer}<|end|>").input_ids for a, (_, _, answer) in zip(asked, lessons, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    at = torch.arange(longest)
    begun, ended = (torch.tensor([[len(one)] for one in some]) for some in (asked, rows))
    return ids, ids.masked_fill((at < begun) | (at >= ended), -100)


def right(policy: Policy, split: Split, number: int) -> dict[str, float]:
    """Share of right greedy answers to each kind of question."""
    found = {}
    for name in emoji.ASKS:
        rows = [tasks.row(f"emoji_{name}", split, k) for k in range(number)]
        prompts = [policy.encode(row.prompt) for row in rows]
        answers = generate(policy, prompts, 1, Sampling(16, temperature=0), [(0, k) for k in range(number)])
        found[name] = round(float(np.mean(exact(answers.texts, [row.columns["answer"] for row in rows]))), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-emoji")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(sorted(words()), LONGEST)
    processor = make_processor(tokenizer, emoji.CELL, emoji.PICTURE)
    model = make_model(tokenizer, emoji.CELL, LAYERS, WIDTH, emoji.PICTURE)
    policy = save(processor, model, args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    row = tasks.row("emoji_count", "train", 0)
    rgb = torch.from_numpy(np.array(row.prompt.parts[0]))
    seen = policy.encode(row.prompt).tokens.pixels["pixel_values"][0]
    torch.testing.assert_close(seen, rgb.permute(2, 0, 1).float() / 127.5 - 1.0)
    started = time.process_time()
    policy.model = model
    teach(policy, processor)
    policy = save(processor, policy.model, args.out)
    print(f"held out: {right(policy, 'eval', 128)}, {time.process_time() - started:.0f} CPU seconds", flush=True)


def words() -> set[str]:
    """All that is asked, said and shown."""
    said = [*emoji.ROWS, *emoji.COLUMNS]
    asked = ["which kind are most things ?", "how many are there ?", "where is the ?", "what is the ?", *emoji.BESIDE]
    texts = [*said, *asked, THINGS, KINDS, "none i see . <think> </think> <answer> </answer>"]
    return {word for text in texts for word in text.split()} | {*emoji.NAMES, *emoji.KINDS, *map(str, range(10))}


def teach(policy: Policy, processor: LlavaProcessor) -> None:
    """All lessons."""
    model, tokenizer, lessons = policy.model, processor.tokenizer, taught()
    ids, labels = encoded(processor, lessons)
    pictures = torch.from_numpy(np.stack([picture for picture, _, _ in lessons]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    shown = 0.0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARMUP, 1 - step / STEPS)
        chosen = torch.randint(len(ids), (BATCH,), generator=torch.Generator().manual_seed(step))
        pixels = pictures[chosen].permute(0, 3, 1, 2).float() / 127.5 - 1.0
        mask = (ids[chosen] != tokenizer.pad_token_id).long()
        loss = model(input_ids=ids[chosen], attention_mask=mask, pixel_values=pixels, labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown += 0.1 * (float(loss.detach()) - shown)
        if (step + 1) % 250 == 0:
            model.eval()
            print(f"step {step + 1}, loss {shown:.3f}, {right(policy, 'train', 48)}", flush=True)
            model.train()
    model.eval()


if __name__ == "__main__":
    main()
