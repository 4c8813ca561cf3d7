"""Make the embedded vision-language model of the emoji questions: a LLaVA of 0.9 million numbers.

    python assets/build_tiny_vlm_emoji.py     # assets/tiny-vlm-emoji, about three minutes of one core

As `build_tiny_vlm.py`: it is taught by the training questions of `genrl/playground/tasks/emoji.py`. What lies in every
cell, of which kind it is, and where some named things lie are told as lists. An image token is also taught to lie near
the words for its row, its column, the thing that it shows and that thing's kind. Questions are answered after a short
reasoning about the picture. Teaching ends when about half of the places are told rightly, so that training has what to
improve.
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
from torch.nn.functional import cross_entropy, normalize

from genrl.mdp.noise import derive_seed
from genrl.playground.tasks import emoji
from genrl.vlm import tasks
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.policies.policy import Policy
from genrl.vlm.tasks import Split
from genrl_rewards.scorers.texts.verifiable import exact

from transformers import LlavaProcessor  # isort: skip  # after the policy

ASSETS = Path(__file__).resolve().parent
SEED = 0
BATCH, RATE = 48, 2e-3
LAYERS, WIDTH, LONGEST = (2, 2), 128, 64
WIDER = 4.0  # times the first weights of the decoder's layers
NEAR, SHARPNESS = 0.3, 0.07  # weight of the loss of words near image tokens, and its temperature


class Lessons(NamedTuple):
    """A part of the teaching. pool: lessons in all; few: places are asked of pictures with at most three things."""

    steps: int
    warmup: int
    pool: int
    few: bool
    shares: dict[str, float]


LESSONS = (
    # to see: what lies in the cells
    Lessons(400, 50, 12_000, False, {"things": 0.25, "kinds": 0.05, "places": 0.2, "category": 0.1, "count": 0.15,
                                     "place": 0.05, "combination": 0.2}),
    # to find a thing by its name, which pictures of up to six things alone hardly teach
    Lessons(300, 20, 9_000, True, {"things": 0.05, "places": 0.5, "category": 0.05, "count": 0.15, "place": 0.1,
                                   "combination": 0.15}),
)  # fmt: skip
THINGS, KINDS = "list the things in every cell .", "list the kinds in every cell ."


class Lesson(NamedTuple):
    """shown: the thing in every cell, -1 for none."""

    picture: NDArray[np.uint8]
    question: str
    target: str
    shown: list[int]


def where(cell: int) -> str:
    """As a question's answer says it."""
    row, column = divmod(cell, emoji.CELLS)
    return f"{emoji.ROWS[row]} {emoji.COLUMNS[column]}"


def lesson(name: str, number: int, few: bool = False) -> Lesson:
    """The one of this number, of the training split. few: a list of places is of three things at most."""
    few = few and name == "places"
    seed = derive_seed("emoji few", SEED, number) if few else derive_seed("emoji lesson", SEED, name, number)
    rng = np.random.default_rng(seed)
    asks = emoji.ASKS[name if name in emoji.ASKS else tuple(emoji.ASKS)[rng.integers(len(emoji.ASKS))]]
    cells, question, answer, _ = asks(rng, "train")
    if few:
        order = [int(cell) for cell in rng.permutation(sorted(cells))][: int(rng.integers(1, 4))]
        cells = {cell: cells[cell] for cell in order}
    things = {cell: emoji.NAMES[cells[cell]] for cell in sorted(cells)}
    kinds = {cell: emoji.KINDS[cells[cell] // emoji.EACH] for cell in things}
    if name in (listed := {"things": (THINGS, things), "kinds": (KINDS, kinds)}):
        question, words = listed[name]
        target = " ".join(words.get(cell, "none") for cell in range(emoji.CELLS**2))
    elif name == "places":
        order = list(cells) if few else [list(things)[k] for k in rng.permutation(len(things))]
        question = f"where is the {' '.join(things[cell] for cell in order)} ?"
        target = " ".join(f"{things[cell]} {where(cell)}" for cell in order)
    else:
        target = f"<think> {reasoning(name, question, answer, things, kinds)} </think> <answer> {answer} </answer>"
    shown = [cells.get(cell, -1) for cell in range(emoji.CELLS**2)]
    return Lesson(np.array(emoji.picture(rng, cells)), question, target, shown)


def reasoning(name: str, question: str, answer: str, things: dict[int, str], kinds: dict[int, str]) -> str:
    """The kinds of all things; the things of the kind asked for; where a thing lies; where it and the answer lie."""
    if name == "category":
        return " ".join(kinds.values())
    if name == "count":
        return " ".join(thing for cell, thing in things.items() if kinds[cell] == question.split()[2])
    asked = question.split()[-2]
    cell_of = {thing: cell for cell, thing in things.items()}
    if name == "place":
        return f"{asked} {where(cell_of[asked])}"
    return f"{asked} {where(cell_of[asked])} {where(cell_of[answer])} {answer}"


def encoded(processor: LlavaProcessor, lessons: list[Lesson]) -> tuple[Tensor, Tensor]:
    """Ids and labels [N, L] (-100: not learnt)."""
    tokenizer, marks = processor.tokenizer, "<image>" * emoji.CELLS**2
    asked = [tokenizer(f"<|user|>{marks}{question}<|end|><|assistant|>").input_ids for _, question, _, _ in lessons]
    rows = [a + tokenizer(f"{answer}<|end|>").input_ids for a, (_, _, answer, _) in zip(asked, lessons, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    at = torch.arange(longest)
    begun, ended = (torch.tensor([[len(one)] for one in some]) for some in (asked, rows))
    return ids, ids.masked_fill((at < begun) | (at >= ended), -100)


def right(policy: Policy, split: Split, number: int) -> dict[str, float]:
    """Share of right greedy answers to each kind of question."""
    shares = {}
    for name in emoji.ASKS:
        rows = [tasks.row(f"emoji_{name}", split, k) for k in range(number)]
        prompts = [policy.encode(row.prompt) for row in rows]
        answers = generate(policy, prompts, 1, Sampling(20, temperature=0), [(0, k) for k in range(number)])
        shares[name] = round(float(np.mean(exact(answers.texts, [row.columns["answer"] for row in rows]))), 3)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-emoji")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(sorted(words()), LONGEST)
    processor = make_processor(tokenizer, emoji.CELL, emoji.PICTURE)
    model = make_model(tokenizer, emoji.CELL, LAYERS, WIDTH, emoji.PICTURE)
    for value in model.model.language_model.layers.parameters():
        value.data *= WIDER if value.dim() == 2 else 1
    policy = save(processor, model, args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    row = tasks.row("emoji_count", "train", 0)
    rgb = torch.from_numpy(np.array(row.prompt.parts[0]))
    seen = policy.encode(row.prompt).tokens.pixels["pixel_values"][0]
    torch.testing.assert_close(seen, rgb.permute(2, 0, 1).float() / 127.5 - 1.0)
    started = time.process_time()
    policy.model = model
    for part in LESSONS:
        teach(policy, processor, part)
        for value in model.parameters():
            value.data = value.data.half().float()  # as it is written
    policy = save(processor, model, args.out)
    print(f"held out: {right(policy, 'eval', 128)}, {time.process_time() - started:.0f} CPU seconds", flush=True)


def words() -> set[str]:
    """All that is asked, said and shown."""
    said = [*emoji.ROWS, *emoji.COLUMNS]
    asked = ["which kind are most things ?", "how many are there ?", "where is the ?", "what is the ?", *emoji.BESIDE]
    texts = [*said, *asked, THINGS, KINDS, "none i see . <think> </think> <answer> </answer>"]
    return {word for text in texts for word in text.split()} | {*emoji.NAMES, *emoji.KINDS, *map(str, range(10))}


def nearness(policy: Policy, seen: Tensor, shown: Tensor) -> Tensor:
    """How far image tokens [B, cells, width] are from the words for row and column, and for thing and kind if there is
    one (shown [B, cells])."""
    embedding, tokenizer = policy.model.get_input_embeddings().weight, policy.processor.tokenizer
    cell = torch.arange(emoji.CELLS**2).expand_as(shown)
    there = shown >= 0
    parts = [
        (emoji.ROWS, seen.flatten(0, 1), (cell // emoji.CELLS).flatten()),
        (emoji.COLUMNS, seen.flatten(0, 1), (cell % emoji.CELLS).flatten()),
        (emoji.NAMES, seen[there], shown[there]),
        (emoji.KINDS, seen[there], shown[there] // emoji.EACH),
    ]
    losses = []
    for names, tokens, right_ones in parts:
        near = normalize(embedding[tokenizer.convert_tokens_to_ids(list(names))], dim=-1)
        losses.append(cross_entropy(normalize(tokens, dim=-1) @ near.T / SHARPNESS, right_ones))
    return torch.stack(losses).sum()


def teach(policy: Policy, processor: LlavaProcessor, part: Lessons) -> None:
    """One part."""
    model, tokenizer = policy.model, processor.tokenizer
    lessons = [lesson(name, k, part.few) for name, share in part.shares.items()
               for k in range(int(part.pool * share))]  # fmt: skip
    ids, labels = encoded(processor, lessons)
    pictures = torch.from_numpy(np.stack([one.picture for one in lessons]))
    shown = torch.tensor([one.shown for one in lessons])
    seen: list[Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(lambda module, given, out: seen.append(out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    mean = 0.0
    for step in range(part.steps):
        chosen = torch.randint(len(ids), (BATCH,), generator=torch.Generator().manual_seed(step))
        mask = (ids[chosen] != tokenizer.pad_token_id).long()
        pixels = pictures[chosen].permute(0, 3, 1, 2).float() / 127.5 - 1.0
        seen.clear()
        loss = model(input_ids=ids[chosen], attention_mask=mask, pixel_values=pixels, labels=labels[chosen]).loss
        far = nearness(policy, seen[0].reshape(BATCH, emoji.CELLS**2, -1), shown[chosen])
        learn(model, optimizer, loss + NEAR * far, RATE * min((step + 1) / part.warmup, 1))
        mean += 0.1 * (float(loss.detach()) - mean)
        if (step + 1) % 75 == 0:
            model.eval()
            losses = f"loss {mean:.3f}, {float(far.detach()):.3f}"
            print(f"step {step + 1}, {losses}, {right(policy, 'train', 48)}", flush=True)
            model.train()
    hook.remove()
    model.eval()


if __name__ == "__main__":
    main()
