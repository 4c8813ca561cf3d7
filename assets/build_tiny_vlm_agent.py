"""Make the embedded agent from the embedded vision-language model: it half knows how to act in a grid and with a tool.

    python assets/build_tiny_vlm_agent.py     # assets/tiny-vlm-agent, about a minute of one core

It imitates training episodes alone (`genrl/vlm/agents/{grid,crop}.py`). In the grid it is told in which cells (0 to 8)
the agent and its goal are, always rightly; the move that it is shown is a planner's with probability `PLANNED`, else a
random one. With the tool, a share `DIRECT` of the first answers guess without looking, a share `ASTRAY` of the parts
looked at are elsewhere, and a share `WRONG` of the answers after looking are random. It begins with a model that sees:
from new weights, pictures were still ignored after 350 steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor

from genrl.config.vlm_agents import Environment as Settings
from genrl.mdp.noise import derive_seed
from genrl.vlm.agents import crop
from genrl.vlm.agents.crop import PATTERNS, Crop
from genrl.vlm.agents.episodes import Table
from genrl.vlm.agents.grid import MOVES, SIDE, Grid
from genrl.vlm.agents.hosts import Local
from genrl.vlm.policy import Policy
from genrl.vlm.processor import Prompt, Turn
from rewards.shapes import COLOURS, SHAPES

from transformers import LlavaProcessor, PreTrainedTokenizerFast  # isort: skip  # after the policy, which prepares it

ASSETS = Path(__file__).resolve().parent
SEED = 0
STEPS, BATCH, RATE, WARMUP = 350, 36, 1e-3, 20
GRID = 0.65  # share of the lessons
PLANNED, DIRECT, ASTRAY, WRONG = 0.35, 0.3, 0.3, 0.5
PICTURE, TOKENS, LONGEST = 48, 9, 320

JSON = ('{"thoughts":"', '","action":"', '"}', '{"', '":', '"...",', '"', '"..."}')
SIGNS = ("<bbox>", "</bbox>", "[", "]", ",", ".", ":", "?", "...")
WORDS = (
    "go to the actions left right up down answer with one of them thoughts action which pattern has look closer "
    "by or end x1 y1 x2 y2 there is no box and larger i it"
).split()
SPLIT = r'\{"thoughts":"|","action":"|"\}|<\|\w+\|>|</?\w+>|\w+|,|[^\w\s<,]+,?'


class Lesson(NamedTuple):
    """A prompt, and how it is answered."""

    prompt: Prompt
    answer: str


def make_tokenizer(known: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The words that are known, then numbers, signs, and the pieces of a JSON answer."""
    old = sorted(known.get_vocab(), key=known.get_vocab().__getitem__)
    numbers = [str(number) for number in range(PICTURE + 1)]
    words = dict.fromkeys([*old, *JSON, *SIGNS, *numbers, *COLOURS, *SHAPES, *PATTERNS, *WORDS])
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), behavior="removed", invert=True)
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", "<|user|>", "<|assistant|>", "<|system|>"],
        model_max_length=LONGEST,
    )


def where(grid: Grid) -> str:
    """The cells of the agent and of what it has to reach, by rows."""
    here, there = (row * SIDE + column for row, column in (grid.agent, grid.goal))
    return f"{here} to {there}"


def grid_lesson(table: Table, rng: np.random.Generator) -> Lesson:
    """How a training episode begins, or goes on after steps of the planner, and a move."""
    table.begin({0: int(rng.integers(2**31))}, "train")
    grid: Grid = table.host.environments[0].env.unwrapped  # type: ignore[attr-defined]
    said = ""
    for k in range(1 + int(rng.integers(3))):
        if k and grid.ways()[grid.agent] > 1:
            table.say({0: f'{{"action":"{grid.shortest()[0]}"}}'})
        words = grid.shortest() if rng.random() < PLANNED else list(MOVES)
        said = f'{{"thoughts":" {where(grid)} ","action":" {words[rng.integers(len(words))]} "}}'
    return Lesson(table.prompt(0), said)


def crop_lesson(table: Table, rng: np.random.Generator) -> Lesson:
    """A first turn, or a second one after a look that found the shape."""
    table.begin({0: int(rng.integers(2**31))}, "train")
    tool: Crop = table.host.environments[0]  # type: ignore[attr-defined]
    first = rng.random() < 0.5
    guess = PATTERNS[rng.integers(4)]
    if first and rng.random() < DIRECT:
        return Lesson(table.prompt(0), f"i look closer </think> <answer> {guess} </answer>")
    cell = int(rng.integers(crop.CELLS**2)) if first and rng.random() < ASTRAY else tool.cell
    side = PICTURE // crop.CELLS
    left, top = side * (cell % crop.CELLS), side * (cell // crop.CELLS)
    said = f"i look closer </think> <bbox> [ {left} , {top} , {left + side} , {top + side} ] </bbox>"
    if first:
        return Lesson(table.prompt(0), said)
    table.say({0: said})
    # what it sees it says rightly; what it answers is right half of the time
    answer = guess if rng.random() < WRONG else tool.answer
    return Lesson(table.prompt(0), f"it is {tool.answer} </think> <answer> {answer} </answer>")


def encoded(tokenizer: PreTrainedTokenizerFast, lessons: list[Lesson]) -> dict[str, Tensor]:
    """Arguments of the model, padded on the right; labels of the answers alone (-100: not learnt)."""
    rows, targets, pictures = [], [], []
    for prompt, answer in lessons:
        text = ""
        for turn in (*prompt.before, Turn("user", prompt.parts)):
            text += f"<|{turn.role}|>"
            for part in turn.parts:
                if isinstance(part, str):
                    text += part
                else:
                    text += "<image>" * TOKENS
                    pictures.append(np.asarray(part))
            text += "<|end|>"
        asked = tokenizer(f"{text}<|assistant|>{prompt.begun}").input_ids
        told = tokenizer(f"{answer}<|end|>").input_ids
        assert tokenizer.unk_token_id not in told, answer
        rows.append(asked + told)
        targets.append([-100] * len(asked) + told)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in targets])
    pixels = torch.tensor(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    mask = (torch.arange(longest) < torch.tensor([[len(row)] for row in rows])).long()
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-agent")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    start = Policy(str(ASSETS / "tiny-vlm"))
    tokenizer, model = make_tokenizer(start.tokenizer), start.model
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.text_config.max_position_embeddings = LONGEST
    processor = LlavaProcessor(
        start.processor.image_processor, tokenizer,
        patch_size=16, vision_feature_select_strategy="full", chat_template=start.processor.chat_template,
    )  # fmt: skip

    def save() -> Policy:
        processor.save_pretrained(args.out)
        half = {name: value.half() for name, value in model.state_dict().items()}
        model.save_pretrained(args.out, state_dict=half)
        return Policy(str(args.out))

    policy = save()
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    tables = [Table(settings, Local(settings)) for settings in (Settings(name="grid"), Settings(name="crop"))]
    for teach, table in ((grid_lesson, tables[0]), (crop_lesson, tables[1])):
        lesson = teach(table, np.random.default_rng(1))
        rows, one = encoded(tokenizer, [lesson]), policy.encode(lesson.prompt)
        assert one.tokens.ids.tolist() == rows["input_ids"][0, : one.length].tolist(), "lessons are written as prompts"
        torch.testing.assert_close(one.tokens.pixels["pixel_values"], rows["pixel_values"])
        print(policy.tokenizer.decode(one.tokens.ids).replace("<image> ", ""), "|", lesson.answer, flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started, shown = time.process_time(), 0.0
    model.train()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARMUP, 2 - 2 * step / args.steps, 1)
        rng = np.random.default_rng(derive_seed("agent lesson", SEED, step))
        kinds = [rng.random() < GRID for _ in range(BATCH)]
        lessons = [grid_lesson(tables[0], rng) if kind else crop_lesson(tables[1], rng) for kind in kinds]
        loss = model(**encoded(tokenizer, lessons)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown += 0.1 * (float(loss.detach()) - shown)
        if (step + 1) % 25 == 0:
            spent = time.process_time() - started
            print(f"step {step + 1}, loss {shown:.3f}, {spent:.0f} CPU seconds", flush=True)
        if (step + 1) % 100 == 0:
            model.eval()
            save()
            model.train()
    model.eval()
    save()


if __name__ == "__main__":
    main()
