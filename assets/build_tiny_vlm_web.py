"""Make the embedded model of web pages: a LLaVA of 0.65 million numbers that half sees pages and clicks on anything.

    python assets/build_tiny_vlm_web.py     # assets/tiny-vlm-web; needs Chromium (docs/vlm_agents.md)

Training pages of MiniWoB++ are recorded in the browser; in lessons their elements are moved about together. Pictures
are learnt alone first, by heads that are thrown away. Then most lessons are questions that the page's own DOM answers:
where something is, and what is at a place. The others show how an answer to a task is written, by a random policy: it
clicks on any element, or, as often as `ASTRAY` says, on any place. What a task's words ask for it was never shown.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from build_tiny_vlm import make_model, make_processor, make_tokenizer, save
from numpy.typing import NDArray
from PIL import Image, ImageColor
from tokenizers import Regex, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp.noise import derive_seed
from genrl.vlm.environments.miniwob import HELP, SIZE, MiniWoB
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt

from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast  # isort: skip  # after the policy, which prepares it

ASSETS = Path(__file__).resolve().parent
SEED = 0
TASKS = ("click-test", "click-test-2", "focus-text", "focus-text-2", "click-dialog", "click-color")
FIXED = ("click-color",)  # pages whose elements fill them
PAGES, BROWSERS = 250, 2  # of each task
ALONE, SEEN, SEEING = 600, 16, 0.3  # batches of pictures alone, their size, and the weight of seeing later
STEPS, BATCH, QUESTIONS, RATE, WARMUP = 500, 10, 8, 2e-3, 40
WHERE, WHAT, ASTRAY = 0.45, 0.25, 0.3
SIDE, PATCH, LAYERS, WIDTH, LONGEST = 160, 20, (2, 2), 112, 128

MEAN, STD = 0.97, 0.2  # of pages, which are mostly white

TOP, CELL, LEAST = 50, 8, 10  # of the page below the instruction; places are told in cells; sides of elements
COLOURS = ("red", "blue", "olive", "lime", "black", "white", "grey", "purple", "orange", "yellow", "cyan", "pink")
COLOURS += ("magenta",)
COLUMNS, ROWS = range(CELL // 2, SIZE[0], CELL), range(TOP + CELL // 2, SIZE[1], CELL)
NAMES = ("Click Me", "ONE", "TWO", "button", "input_text", "span", "p", "div", *COLOURS)
ASKED = "where is ? what is at"
Pair = tuple[str, str]  # what is asked, and the answer
SPLIT = r"<\|\w+\|>|<\w+>|\w+|[^\w\s]"


class Element(NamedTuple):
    """What it is called, and its box in pixels."""

    name: str
    left: float
    top: float
    width: float
    height: float

    @property
    def place(self) -> str:
        """The cell of its middle."""
        return cell_of(self.left + self.width / 2, self.top + self.height / 2)


class Page(NamedTuple):
    """As it was recorded."""

    task: str
    picture: NDArray[np.uint8]
    text: str
    elements: list[Element]


def cell_of(x: float, y: float) -> str:
    """The middle of the nearest cell."""
    column = min(max(int(x // CELL), 0), len(COLUMNS) - 1)
    row = min(max(int((y - TOP) // CELL), 0), len(ROWS) - 1)
    return f"{COLUMNS[column]} {ROWS[row]}"


def name_of(element: dict[str, Any]) -> str:
    """Its text where that is a name, the colour of a coloured box, or its tag."""
    text = str(element["text"]).strip(" !")
    if text in NAMES:
        return text
    if element["tag"] == "div" and element["bg_color"][3] == 1:
        colour = 255 * np.array(element["bg_color"][:3])
        return min(COLOURS, key=lambda name: float(np.abs(colour - ImageColor.getrgb(name)).sum()))
    return str(element["tag"])


def record(task: str) -> list[Page]:
    """Training pages of a task."""
    environment, found = MiniWoB(tasks=[task], by="place"), []
    for seed in range(PAGES):
        _, text = environment.reset(seed, "train")
        elements = []
        for one in environment.elements():
            box = (float(np.squeeze(one[side])) for side in ("left", "top", "width", "height"))
            element = Element(name_of(one), *box)
            if min(element.width, element.height) >= LEAST and one["id"] != "area":
                elements.append(element)
        found.append(Page(task, environment.render().copy(), str(text), elements))
    environment.close()
    return found


def moved(page: Page, rng: np.random.Generator) -> Page:
    """With its elements elsewhere on the page, all of them by the same way."""
    if page.task in FIXED:
        return page
    left, top = min(one.left for one in page.elements), min(one.top for one in page.elements)
    right = max(one.left + one.width for one in page.elements)
    bottom = max(one.top + one.height for one in page.elements)
    x = int(rng.integers(-int(left), max(SIZE[0] - int(np.ceil(right)), -int(left)) + 1))
    y = int(rng.integers(TOP - int(top), max(SIZE[1] - int(np.ceil(bottom)), TOP - int(top)) + 1))
    picture = np.full_like(page.picture, 255)
    picture[:TOP] = page.picture[:TOP]
    below, drawn = page.picture[TOP:], picture[TOP:]
    height, width = drawn.shape[:2]
    drawn[max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)] = below[
        max(-y, 0) : height - max(y, 0), max(-x, 0) : width - max(x, 0)
    ]
    return page._replace(
        picture=picture, elements=[one._replace(left=one.left + x, top=one.top + y) for one in page.elements]
    )


def shown(page: Page) -> Image.Image:
    """As the model gets it."""
    return Image.fromarray(page.picture).resize((SIDE, SIDE), Image.Resampling.BOX)


def pixels_of(pages: list[Page]) -> Tensor:
    """[N, 3, H, W]"""
    pixels = torch.from_numpy(np.stack([np.array(shown(page)) for page in pages]))
    return (pixels.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD


def question(page: Page, rng: np.random.Generator) -> Pair:
    """About a page; or a task, and a click of the random policy."""
    one, kind = page.elements[rng.integers(len(page.elements))], rng.random()
    if kind < WHERE:
        return f"where is {one.name} ?", one.place
    if kind < WHERE + WHAT:
        x, y = (low + rng.uniform(0.1, 0.9) * size for low, size in ((one.left, one.width), (one.top, one.height)))
        return f"what is at {cell_of(x, y)} ?", one.name
    anywhere = f"{COLUMNS[rng.integers(len(COLUMNS))]} {ROWS[rng.integers(len(ROWS))]}"
    return f"{page.text}\n{HELP['place']}", f"click {anywhere if rng.random() < ASTRAY else one.place}"


def packed(tokenizer: PreTrainedTokenizerFast, pages: list[Page], asked: list[list[Pair]]) -> dict[str, Tensor]:
    """Arguments of the model: a row has a picture and all questions about it, none of which sees another.

    labels: of the answers alone (-100: not learnt). position_ids: each question's begin behind the picture.
    """
    head = tokenizer(f"<|user|>{'<image>' * (SIDE // PATCH) ** 2}").input_ids
    rows = []
    for pairs in asked:
        tokens = [(token, -100, 0, place) for place, token in enumerate(head)]
        for number, (text, answer) in enumerate(pairs, 1):
            before = tokenizer(f"{text}<|end|><|assistant|>").input_ids
            after = tokenizer(f"{answer}<|end|>").input_ids
            labels = [-100] * len(before) + after
            tokens += [
                (token, label, number, len(head) + place)
                for place, (token, label) in enumerate(zip(before + after, labels, strict=True))
            ]
        rows.append(torch.tensor(tokens))
    blank = torch.tensor([tokenizer.pad_token_id, -100, -1, 0])
    longest = max(map(len, rows))
    ids, labels, part, places = torch.stack(
        [torch.cat([row, blank.expand(longest - len(row), 4)]) for row in rows]
    ).unbind(-1)
    seen = (part[:, :, None] == part[:, None, :]) | (part[:, None, :] == 0)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": places,
        "attention_mask": (seen & torch.ones(longest, longest, dtype=torch.bool).tril())[:, None],
        "pixel_values": pixels_of(pages),
    }


class Seen(nn.Module):
    """What each of a picture's patches shows: the name of its element, and the cell of that element's middle.

    Heads on the features that the language model gets; thrown away in the end. Without them the pictures are ignored
    for long.
    """

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.sizes = (len(NAMES) + 1, len(COLUMNS), len(ROWS))
        self.heads = nn.Linear(WIDTH, sum(self.sizes))
        model.model.multi_modal_projector.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, features: Tensor) -> None:
        self.features = features

    def loss(self, pages: list[Page]) -> Tensor:
        """Cross entropies of the patches whose features were computed last; places of those with an element alone."""
        told = torch.from_numpy(np.stack([patches(page) for page in pages])).flatten(0, 1)
        outputs = self.heads(self.features).flatten(0, 1).split(self.sizes, -1)
        some = told[:, 0] < len(NAMES)
        name = functional.cross_entropy(outputs[0], told[:, 0])
        return name + sum(functional.cross_entropy(outputs[k][some], told[some, k]) for k in (1, 2))


def patches(page: Page) -> NDArray[np.int64]:
    """Name, column and row for each patch of the picture, [P, 3]; the last name + 1 for none."""
    steps = (np.arange(SIDE // PATCH) + 0.5) * PATCH / SIDE
    found = np.full((len(steps), len(steps), 3), (len(NAMES), 0, 0))
    for one in page.elements:  # what is drawn later lies above
        x, y = steps * SIZE[0], steps * SIZE[1]
        margin = (PATCH / SIDE / 2 * SIZE[0], PATCH / SIDE / 2 * SIZE[1])  # small ones have no patch's middle
        across = (one.left - margin[0] < x) & (x < one.left + one.width + margin[0])
        down = (one.top - margin[1] < y) & (y < one.top + one.height + margin[1])
        column, row = map(int, one.place.split())
        found[np.ix_(down, across)] = (NAMES.index(one.name), COLUMNS.index(column), ROWS.index(row))
    return found.reshape(-1, 3)


def teach(policy: Policy, pages: list[Page]) -> None:
    """By pictures alone, then by questions, each at a rate that falls to 0."""
    model, seen = policy.model, Seen(policy.model)
    average, started = 0.0, time.process_time()
    model.train()
    for step in range(ALONE + STEPS):
        first, k = step < ALONE, step if step < ALONE else step - ALONE
        if k == 0:
            both = [*model.parameters(), *seen.parameters()]
            optimizer = torch.optim.AdamW(both, betas=(0.9, 0.95), weight_decay=0.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((k + 1) / WARMUP, 1 - k / (ALONE if first else STEPS))
        rng = np.random.default_rng(derive_seed("web lesson", SEED, step))
        some = [moved(pages[rng.integers(len(pages))], rng) for _ in range(SEEN if first else BATCH)]
        if first:
            model.model.get_image_features(pixels_of(some))
            loss = seen.loss(some)
        else:
            asked = [[question(page, rng) for _ in range(QUESTIONS)] for page in some]
            loss = model(**packed(policy.tokenizer, some, asked)).loss + SEEING * seen.loss(some)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both, 1.0)
        optimizer.step()
        average += 0.1 * (float(loss.detach()) - average)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}, loss {average:.3f}, {time.process_time() - started:.0f} CPU seconds", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-web")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    with get_context("spawn").Pool(BROWSERS) as pool:
        pages = [page for some in pool.imap(record, TASKS) for page in some]
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="removed", invert=True)
    texts = sorted({page.text for page in pages}) + [HELP["place"], ASKED, " ".join(NAMES)]
    words = [word for text in texts for word, _ in split.pre_tokenize_str(text)]
    tokenizer = make_tokenizer([*words, *map(str, COLUMNS), *map(str, ROWS)], LONGEST)
    tokenizer.backend_tokenizer.pre_tokenizer = split
    processor = make_processor(tokenizer, PATCH, SIDE)
    processor.image_processor.image_mean, processor.image_processor.image_std = [MEAN] * 3, [STD] * 3
    model = make_model(tokenizer, PATCH, LAYERS, WIDTH, SIDE)
    policy = save(processor, model, args.out)
    policy.model = model
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    one, pair = pages[0], question(pages[0], np.random.default_rng(SEED))
    prompt, row = policy.encode(Prompt((shown(one), pair[0]))).tokens, packed(tokenizer, [one], [[pair]])
    assert prompt.ids.tolist() == row["input_ids"][0, : len(prompt.ids)].tolist(), "lessons are written as prompts"
    torch.testing.assert_close(prompt.pixels["pixel_values"], row["pixel_values"])
    teach(policy, pages)
    save(processor, model, args.out)


if __name__ == "__main__":
    main()
