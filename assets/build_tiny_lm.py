"""Make the embedded language model and its prompts from the captions of the world. See assets/README.md.

    python assets/build_tiny_lm.py --stage prompts   # assets/prompts/paraphrases_{train,eval}.jsonl
    python assets/build_tiny_lm.py --stage lm        # assets/tiny-lm, about 2 minutes of one core

A paraphrase says what a caption says in words that the text encoders of tiny-t2i have no token for and were never
trained on ("a pair of ruby discs" for "two red circles"). The language model learns to answer a paraphrase as a model
that was never told what the drawing model understands would: rightly, half rightly, with ornaments, wrongly, or without
the tags that it is asked for, in the shares of `ANSWERS`. What to answer is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from genrl.playground import shapes as world
from genrl_rewards.scorers.objects.shapes import COLOURS, NUMBERS, RELATIONS, SHAPES

ASSETS = Path(__file__).resolve().parent
SEED = 0
STEPS, BATCH, RATE = 600, 48, 3e-3
LIMIT = 14  # tokens of a caption beside the first and the last one (assets/tiny-t2i/tokenizer)

COLOUR_WORDS = {"red": "ruby", "green": "jade", "blue": "navy", "yellow": "gold", "purple": "plum"}
SHAPE_WORDS = {"circle": "disc", "square": "box", "triangle": "cone"}
NUMBER_WORDS = {"two": "a pair of", "three": "a trio of", "four": "a quad of"}
RELATION_WORDS = {"to the left of": "left of", "to the right of": "right of", "above": "over", "below": "under"}
ORNAMENTS = ("vivid", "lovely", "ultra", "crisp")
ANSWERS = {"right": 0.3, "half": 0.25, "ornate": 0.2, "wrong": 0.15, "bare": 0.1}
"""right: the caption. half: some words stay as they were. ornate: an ornament before each colour. wrong: one thing is
another. bare: the caption without its tags."""

CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>")
# How Qwen2's tokenizer cuts, digits one by one: transformers takes that class for a Qwen2 model.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def units(caption: str) -> list[str]:
    """A caption cut into what is replaced as one: words, and relations."""
    parts, words = [], caption.split()
    while words:
        length = next((len(r.split()) for r in RELATIONS if words[: len(r.split())] == r.split()), 1)
        parts.append(" ".join(words[:length]))
        words = words[length:]
    return parts


def said_otherwise(unit: str) -> str | None:
    """The other word for it; None where it has none."""
    if unit in COLOUR_WORDS or unit in NUMBER_WORDS or unit in RELATION_WORDS:
        return {**COLOUR_WORDS, **NUMBER_WORDS, **RELATION_WORDS}[unit]
    shape = unit.removesuffix("s")
    if shape not in SHAPE_WORDS:
        return None
    plural = {"disc": "discs", "box": "boxes", "cone": "cones"}
    return plural[SHAPE_WORDS[shape]] if unit.endswith("s") else SHAPE_WORDS[shape]


def length(text: str) -> int:
    """Tokens in tiny-t2i: one for a word of the grammar, one for each letter of any other."""
    return sum(1 if word in world.GRAMMAR else len(word) for word in text.split())


def paraphrase(caption: str, rng: np.random.Generator) -> str:
    """As many words as fit are said otherwise, in random order, at least one."""
    said = units(caption)
    for k in rng.permutation(len(said)):
        other = said_otherwise(said[k])
        if other is not None and length(" ".join([*said[:k], other, *said[k + 1 :]])) <= LIMIT:
            said[k] = other
    return " ".join(said)


def answer(caption: str, prompt: str, rng: np.random.Generator) -> str:
    """What the language model is taught to answer to the prompt, drawn from `ANSWERS`."""
    kind = list(ANSWERS)[rng.choice(len(ANSWERS), p=list(ANSWERS.values()))]
    text = caption
    if kind == "half":
        text = " ".join(
            other if other is not None and other in prompt and rng.random() < 0.6 else unit
            for unit in units(caption)
            for other in [said_otherwise(unit)]
        )
    elif kind == "ornate":
        text = " ".join(f"{ORNAMENTS[rng.integers(4)]} {w}" if w in COLOURS else w for w in caption.split())
    elif kind == "wrong":
        text = mistaken(caption, rng)
    return text if kind == "bare" else f"<answer>{text}</answer>"


def mistaken(caption: str, rng: np.random.Generator) -> str:
    """One unit, drawn at random, is another of its kind."""
    said = units(caption)
    kinds = [tuple(COLOURS), SHAPES, tuple(f"{s}s" for s in SHAPES), tuple(NUMBERS)[2:], RELATIONS]
    where = [(k, kind) for k, unit in enumerate(said) for kind in kinds if unit in kind]
    k, kind = where[rng.integers(len(where))]
    others = [other for other in kind if other != said[k]]
    said[k] = others[rng.integers(len(others))]
    return " ".join(said)


def caption_of(rng: np.random.Generator) -> str:
    return world.caption(world.sample_scene(rng, split="all", word_share=0.0))


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 entries, learnt from captions and paraphrases; with a chat template."""
    rng = np.random.default_rng([SEED, 1])
    corpus = []
    for _ in range(4000):
        caption = caption_of(rng)
        prompt = paraphrase(caption, rng)
        corpus += [prompt, answer(caption, prompt, rng)]
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=512, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT,
        model_max_length=256,
    )
    fast.save_pretrained(folder)
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def train(folder: Path) -> None:
    """Teacher forcing on the answers; AdamW, cosine to 0, 100 steps of warm-up."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(folder)
    model, rng = make_model(tokenizer), np.random.default_rng([SEED, 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.process_time()
    for step in range(STEPS):
        rows = []
        for _ in range(BATCH):
            caption = caption_of(rng)
            prompt = paraphrase(caption, rng) if rng.random() < 0.9 else caption
            chat = [{"role": "user", "content": prompt}]
            asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(asked)["input_ids"]
            said = tokenizer(answer(caption, prompt, rng))["input_ids"]
            rows.append((ids, [*said, tokenizer.eos_token_id]))
        longest = max(len(ids) + len(said) for ids, said in rows)
        tokens = torch.full((BATCH, longest), tokenizer.pad_token_id)
        labels = torch.full((BATCH, longest), -100)
        for row, (ids, said) in enumerate(rows):
            tokens[row, : len(ids) + len(said)] = torch.tensor([*ids, *said])
            labels[row, len(ids) : len(ids) + len(said)] = torch.tensor(said)
        rate = RATE * min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(
                f"step {step + 1} loss {loss.item():.3f} {time.process_time() - started:.0f} s of one core", flush=True
            )
    model.save_pretrained(folder)


def write_prompts(folder: Path) -> None:
    for split in ("train", "eval"):
        rng = np.random.default_rng([SEED, split == "eval", 3])
        rows = [{"prompt": paraphrase(text, rng), "caption": text} for text in world.shapes_prompts(split)]
        kept = [row for row in rows if row["prompt"] != row["caption"]]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        (folder / f"paraphrases_{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["prompts", "lm"], required=True)
    parser.add_argument("--out", type=Path, default=ASSETS)
    options = parser.parse_args()
    if options.stage == "prompts":
        write_prompts(options.out / "prompts")
    else:
        train(options.out / "tiny-lm")
