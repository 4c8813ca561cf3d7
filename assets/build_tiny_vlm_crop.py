"""Make the embedded model that looks closer from the embedded vision-language model: it half knows how to use a tool.

    python assets/build_tiny_vlm_crop.py     # assets/tiny-vlm-crop

It imitates training episodes of `genrl/vlm/agents/{crop,search,watch}.py`. A share `DIRECT` of the first answers guess
without looking, a share `ASTRAY` of parts, words and scores are any, and a share `WRONG` of the answers; in the last
phase a share `HABIT` of the looks are at the middle of the picture, so that it often looks there first. Two further
questions are always answered rightly and teach it to see: where in a picture the shape is, and what a part shows. Every
phase begins with the weights in half precision and a new optimiser.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from build_tiny_vlm import QUESTION, learn, make_tokenizer, save
from tokenizers import Regex, pre_tokenizers
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground import crop
from genrl.playground.crop import CELLS, SHOWN, Thing
from genrl.playground.watch import FRAMES, Watch
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.engines.generation import Sampling
from genrl.vlm.environments.contract import Split
from genrl.vlm.environments.hosts import Local
from genrl.vlm.episodes.episodes import Table, play
from genrl.vlm.episodes.evaluate import SEEDS
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt, join_pixels
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES

from transformers import LlavaProcessor  # isort: skip  # after the policy, which prepares it

ASSETS = Path(__file__).resolve().parent
SEED = 0
PHASES = ((450, 2e-3, 2e-3, 30), (100, 1e-3, 0.0, 10), (250, 1e-3, 0.0, 10))
"""Batches, rates at the beginning and at the end, and batches of warming up."""
BATCH, LONGEST = 32, 320
EVERY, PROBE, NEW = 50, 64, 24
SEEING, CROP = 0.45, 0.3  # shares of the lessons; the rest search. Every `CLIPS`th batch is of clips
DIRECT, ASTRAY, HABIT, AGAIN, WRONG = 0.15, 0.3, 0.5, 0.5, 0.35
CLIPS = 8

SIGNS = ("<bbox>", "</bbox>", "<search>", "</search>", "<clip>", "</clip>", "<score>", "</score>")
MARKS = ("[", "]", ",", ".", ":", "?")
WORDS = (
    "which colour is inside the look closer at last page by or end x1 y1 x2 y2 a b there no box and answer larger i it "
    "what this where search action other to frames shape appears clip begin of for each frame nothing"
).split()
SPLIT = r"<\|\w+\|>|</?\w+>|\w+|[^\w\s]"
SIDE = SHOWN // CELLS

Lesson = tuple[Prompt, str]


def answered(rng: np.random.Generator, thought: str, answer: str | None, words: Sequence[str]) -> str:
    """The answer, or any of the words where there is none, and as often as `WRONG` says."""
    if answer is None or rng.random() < WRONG:
        answer = words[rng.integers(len(words))]
    return f"{thought} </think> <answer> {answer} </answer>"


def call(left: int, top: int) -> str:
    """Of the tool, for a part as large as a cell."""
    return f"<bbox> [ {left} , {top} , {left + SIDE} , {top + SIDE} ] </bbox>"


def look(rng: np.random.Generator, cell: int, *, habit: bool) -> str:
    """At a cell; or, as often as `HABIT` says, at the middle; or, without, as `ASTRAY` says, anywhere in half cells."""
    left, top = SIDE * (cell % CELLS), SIDE * (cell // CELLS)
    if rng.random() < (HABIT if habit else ASTRAY):
        left, top = (SIDE, SIDE) if habit else (SIDE // 2 * int(k) for k in rng.integers(2 * CELLS - 1, size=2))
    return f"i look closer </think> {call(left, top)}"


def looking(table: Table, rng: np.random.Generator, thing: Thing, *, habit: bool) -> Lesson:
    """From a picture on: a guess, a look, or what is said after up to two looks, of which the last but one missed."""
    if rng.random() < 0.4:
        direct = rng.random() < DIRECT
        return table.prompt(0), answered(rng, "i look closer", None, COLOURS) if direct else look(
            rng, thing.cell, habit=habit
        )
    for last in (False, True):
        said = look(rng, thing.cell, habit=habit)
        table.say({0: said})
        if crop.holds(crop.boxes_in(said)[0], thing):  # type: ignore[arg-type]
            return table.prompt(0), answered(rng, f"it is {thing.inside}", thing.inside, COLOURS)
        if last or rng.random() > AGAIN:
            break
    again = not last and rng.random() < 0.5
    return table.prompt(0), look(rng, thing.cell, habit=habit) if again else answered(
        rng, "it is nothing", None, COLOURS
    )


def crop_lesson(table: Table, rng: np.random.Generator, *, habit: bool) -> Lesson:
    """Of the crop tool."""
    table.begin({0: int(rng.integers(2**31))}, "train")
    return looking(table, rng, table.host.environments[0].thing, habit=habit)  # type: ignore[attr-defined]


def search_lesson(table: Table, rng: np.random.Generator, *, habit: bool) -> Lesson:
    """A search by the words of the question, each any other one as often as `ASTRAY` says; or what follows."""
    table.begin({0: int(rng.integers(2**31))}, "train")
    thing: Thing = table.host.environments[0].thing  # type: ignore[attr-defined]
    words = [thing.colour, thing.shape]
    if first := rng.random() < 0.5:
        words = [kinds[rng.integers(len(kinds))] if rng.random() < ASTRAY else word
                 for word, kinds in zip(words, (COLOURS, SHAPES), strict=True)]  # fmt: skip
    said = f"i search </think> <search> {' '.join(words)} </search>"
    if first:
        return table.prompt(0), said
    table.say({0: said})
    return looking(table, rng, thing, habit=habit)


def watch_lesson(table: Table, rng: np.random.Generator, *, scored: bool) -> Lesson:
    """Of a clip: an answer, or a request for frames; for Conan with scores, each any as often as `ASTRAY` says."""
    table.begin({0: int(rng.integers(2**31))}, "train")
    clip: Watch = table.host.environments[0]  # type: ignore[attr-defined]
    for turn in range(2):
        true = [1 + 4 * (k in clip.relevant) for k in clip.shown]
        scores = [int(rng.integers(1, 6)) if rng.random() < ASTRAY else score for score in true]
        before = " ".join(map(str, scores)) + " </score> <think> " if scored else ""
        first = int(rng.integers(1, FRAMES + 1))
        last = min(first + int(rng.integers(4)), FRAMES)
        request = f"{before}i see nothing </think> <clip> [ {first} , {last} ] </clip>"
        visible = bool(clip.relevant & set(clip.shown))
        if turn or visible or rng.random() < 0.5:
            break
        table.say({0: request})
    if visible:
        return table.prompt(0), before + answered(rng, f"i see {clip.answer}", clip.answer, SHAPES)
    give_up = rng.random() < DIRECT
    return table.prompt(0), before + answered(rng, "i see nothing", None, SHAPES) if give_up else request


def seeing_lesson(rng: np.random.Generator) -> Lesson:
    """What is in a picture, and where."""
    thing = crop.random_thing(rng)
    while thing.held_out:
        thing = crop.random_thing(rng)
    left, top = SIDE * (thing.cell % CELLS), SIDE * (thing.cell // CELLS)
    if rng.random() < 0.7:
        return Prompt((crop.shown(thing), "where is it ?")), call(left, top)
    box = tuple(crop.FACTOR * number for number in (left, top, left + SIDE, top + SIDE))
    part = crop.cut_out(crop.draw(thing), box)  # type: ignore[arg-type]
    return Prompt((part, "what is this ?")), f"{thing.colour} {thing.shape} {thing.inside}"


def batch(policy: Policy, lessons: list[Lesson]) -> dict[str, Tensor]:
    """Arguments of the model, padded on the right; labels of the answers alone (-100: not learnt)."""
    tokenizer = policy.tokenizer
    asked = [policy.encode(prompt).tokens for prompt, _ in lessons]
    answers = [tokenizer(f"{answer}<|end|>", return_tensors="pt").input_ids[0] for _, answer in lessons]
    assert not any((one == tokenizer.unk_token_id).any() for one in answers)
    rows = [torch.cat([a.ids, t]) for a, t in zip(asked, answers, strict=True)]
    labels = [torch.cat([torch.full_like(a.ids, -100), t]) for a, t in zip(asked, answers, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()
    labels_ = pad(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels_, **join_pixels(asked)}


def probe(
    policy: Policy, table: Table, split: Split, *, blind: bool = False, temperature: float = 0.0
) -> dict[str, float]:
    """Means over episodes of the parts of their rewards."""
    seeds = {slot: derive_seed("probe", slot) % SEEDS for slot in range(PROBE)}
    play(policy, table, seeds, split, Sampling(NEW, temperature=temperature), ("probe",), blind=blind)
    parts = [table.episodes[slot].parts for slot in seeds]
    return {name: round(float(np.mean([one[name] for one in parts])), 2) for name in parts[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm-crop")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    start = Policy(str(ASSETS / "tiny-vlm"))
    words = [*map(str, range(10)), *COLOURS, *QUESTION, *SIGNS, *MARKS, *map(str, range(SHOWN + 1)), *SHAPES, *WORDS]
    tokenizer = make_tokenizer(words, LONGEST)
    known = start.tokenizer.get_vocab()
    assert all(tokenizer.get_vocab()[word] == number for word, number in known.items()), "its words keep their places"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), behavior="removed", invert=True)
    model = start.model
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.text_config.max_position_embeddings = LONGEST
    processor = LlavaProcessor(
        start.processor.image_processor, tokenizer,
        patch_size=16, vision_feature_select_strategy="full", chat_template=start.processor.chat_template,
    )  # fmt: skip

    policy = save(processor, model, args.out)
    policy.model = model
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    games = {
        "crop": Settings(name="crop"),
        "search": Settings(name="search"),
        "watch": Settings(name="watch", options={"rule": "para_grpo", "budgets": [2, 4, 8]}),
        "conan": Settings(name="watch", options={"rule": "conan", "begun": "<score>"}),
    }
    tables = {name: Table(settings, Local(settings)) for name, settings in games.items()}
    probed = {name: Table(settings, Local(settings)) for name, settings in games.items()}

    def lesson(rng: np.random.Generator, step: int, *, habit: bool) -> Lesson:
        if step % CLIPS == CLIPS - 1:
            scored = rng.random() < 0.5
            return watch_lesson(tables["conan" if scored else "watch"], rng, scored=scored)
        kind = rng.random()
        if kind < SEEING:
            return seeing_lesson(rng)
        name, teach = ("crop", crop_lesson) if kind < SEEING + CROP else ("search", search_lesson)
        return teach(tables[name], rng, habit=habit)

    started, shown = time.process_time(), 0.0
    plan = [(phase, k) for phase, (number, *_) in enumerate(PHASES) for k in range(number)]
    for step, (phase, k) in enumerate(plan):
        number, first, last, warmup = PHASES[phase]
        if k == 0:
            for parameter in model.parameters() if phase else ():
                parameter.data = parameter.data.half().float()
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        rng = np.random.default_rng(derive_seed("crop lesson", SEED, step))
        model.train()
        loss = model(**batch(policy, [lesson(rng, step, habit=phase == 2) for _ in range(BATCH)])).loss
        learn(model, optimizer, loss, min(first * (k + 1) / warmup, first + (last - first) * k / number))
        model.eval()
        shown += 0.1 * (float(loss.detach()) - shown)
        if (step + 1) % EVERY == 0:
            shares = probe(policy, probed["crop"], "train")
            seconds = time.process_time() - started
            print(f"step {step + 1}, loss {shown:.3f}, {seconds:.0f} CPU seconds, {shares}", flush=True)
            save(processor, model, args.out)
    policy = save(processor, model, args.out)
    for name, table in probed.items():
        for kind in ({}, {"blind": True}, {"temperature": 1.0}):
            print(f"held out, {name} {kind}: {probe(policy, table, 'eval', **kind)}", flush=True)


if __name__ == "__main__":
    main()
