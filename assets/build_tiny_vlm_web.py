"""Make the embedded model of web pages: a LLaVA of 0.47 million numbers that clicks on any listed element.

    python assets/build_tiny_vlm_web.py     # assets/tiny-vlm-web; needs Chromium (docs/vlm_agents.md)

Training pages of MiniWoB++ are recorded in the browser, and a random policy is imitated: "click R", R any of the
elements that the page's list names. So the model knows the form of an answer and what can be clicked on. It has not
been shown what an instruction asks for.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from build_tiny_vlm import learn, make_model, make_processor, make_tokenizer, save
from build_tiny_vlm_crop import Lesson, batch
from tokenizers import Regex, pre_tokenizers

from genrl.mdp.noise import derive_seed
from genrl.vlm.environments.contract import Observation
from genrl.vlm.environments.miniwob import MiniWoB
from genrl.vlm.policies.processor import Prompt

ASSETS = Path(__file__).resolve().parent
SEED = 0
TASKS = ("click-test-2", "focus-text-2", "click-dialog", "click-tab")
PAGES, STEPS, BATCH, RATE, WARMUP = 50, 160, 24, 2e-3, 20  # pages of each task
SIDE, PATCH, LAYERS, WIDTH, LONGEST = 80, 20, (1, 2), 96, 256
NUMBERS = range(41)
SPLIT = r"<\|\w+\|>|<\w+>|\w+|[^\w\s]"


def record() -> tuple[list[tuple[Observation, list[int]]], str]:
    """Training pages with the references of their elements, and how the environment asks for an answer."""
    environment, pages = MiniWoB(tasks=list(TASKS), picture=[SIDE, SIDE]), []
    for place in range(len(TASKS)):  # a task at a time, which loads its page once
        for number in range(PAGES):
            seen = environment.reset(number * len(TASKS) + place, "train")
            pages.append((seen, [int(one["ref"]) for one in environment.elements()]))
    environment.close()
    return pages, environment.help


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-web")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    pages, asked = record()
    print(f"{len(pages)} pages", flush=True)
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="removed", invert=True)
    texts = [asked, *(str(text) for (_, text), _ in pages)]
    words = [word for text in texts for word, _ in split.pre_tokenize_str(text)]
    tokenizer = make_tokenizer([*map(str, NUMBERS), *words], LONGEST)
    tokenizer.backend_tokenizer.pre_tokenizer = split
    processor = make_processor(tokenizer, PATCH, SIDE)
    model = make_model(tokenizer, PATCH, LAYERS, WIDTH, SIDE)
    policy = save(processor, model, args.out)
    policy.model = model
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)

    def lesson(rng: np.random.Generator) -> Lesson:
        (picture, text), listed = pages[rng.integers(len(pages))]
        return Prompt((picture, f"{text}\n{asked}")), f"click {listed[rng.integers(len(listed))]}"

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    started, average = time.process_time(), 0.0
    model.train()
    for step in range(STEPS):
        rng = np.random.default_rng(derive_seed("web lesson", SEED, step))
        loss = model(**batch(policy, [lesson(rng) for _ in range(BATCH)])).loss
        learn(model, optimizer, loss, RATE * min((step + 1) / WARMUP, 1 - step / STEPS))
        average += 0.1 * (float(loss.detach()) - average)
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}, loss {average:.3f}, {time.process_time() - started:.0f} CPU seconds", flush=True)
    model.eval()
    save(processor, model, args.out)


if __name__ == "__main__":
    main()
