"""Make the embedded vision-language model: a LLaVA of 0.9 million numbers that half knows how to answer.

    python assets/build_tiny_vlm.py     # assets/tiny-vlm, about half a minute of one core

It is taught by the questions of `genrl/playground/tasks/shapes.py`, from the training arrangements alone. Of the
answers that it is shown two in five are drawn at random, and one in five has no tags, so it learns what an answer looks
like and only half which one is right. A further question, the colour in every cell, is always answered rightly: it
teaches the model to see (without it the pictures are ignored). Training ends when the share `ENOUGH` of the greedy
answers to either question is right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.shapes import SIZE, Scene, draw
from genrl.playground.tasks import shapes
from genrl.vlm import tasks
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.policies.policy import Policy
from genrl.vlm.tasks import Split
from genrl_rewards.scorers.objects.shapes import COLOURS
from genrl_rewards.scorers.texts.verifiable import exact

from transformers import (  # isort: skip  # after the policy, which makes it importable beside any torchvision
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.siglip import SiglipVisionConfig  # isort: skip
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil  # isort: skip

ASSETS = Path(__file__).resolve().parent
SEED = 0
POOL, BATCH, RATE, WARMUP = 16_000, 64, 2e-3, 40
STEPS = 500  # at most
ENOUGH, EVERY, PROBE = 0.42, 25, 256
COUNTS, WRONG, UNTAGGED, DENSE = 0.7, 0.4, 0.2, 0.4  # shares: of questions, labels, answers, rows

SPECIAL = ("<pad>", "<|end|>", "<unk>", "<image>", "<|user|>", "<|assistant|>", "<|system|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
QUESTION = "how many shapes are there ? which colour have most list colours in every cell none i see .".split()
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}"
    "{{ c.text }}{% endif %}{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(words: Iterable[str], longest: int = 64) -> PreTrainedTokenizerFast:
    """Whole words, white space between them. longest: tokens of a text."""
    words = dict.fromkeys([*SPECIAL, *TAGS, *words])
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", "<|user|>", "<|assistant|>", "<|system|>"],
        model_max_length=longest,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    patch: int = 16,
    layers: tuple[int, int] = (3, 2),
    width: int = 128,
    picture: int = shapes.PICTURE,
) -> LlavaForConditionalGeneration:
    """SigLIP on patches of so many pixels, and Llama. layers: of either; picture: side of the pictures."""
    size = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=SiglipVisionConfig(
                **size, num_hidden_layers=layers[0], image_size=picture, patch_size=patch, vision_use_head=False
            ),
            text_config={
                **size,
                "model_type": "llama",
                "num_hidden_layers": layers[1],
                "num_key_value_heads": 4,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": tokenizer.model_max_length,
                "tie_word_embeddings": False,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
            },
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def make_processor(
    tokenizer: PreTrainedTokenizerFast, patch: int = 16, picture: int = shapes.PICTURE
) -> LlavaProcessor:
    """Of pictures of so many pixels a side."""
    images = SiglipImageProcessorPil(size={"height": picture, "width": picture})
    return LlavaProcessor(
        images, tokenizer, patch_size=patch, vision_feature_select_strategy="full", chat_template=CHAT
    )


def colours_of(scene: Scene) -> str:
    """The colours of the nine cells, by rows."""
    words = ["none"] * shapes.CELLS**2
    for thing in scene.things:
        place = [int(c * shapes.CELLS / SIZE) for c in (thing.x, thing.y)]
        words[place[1] * shapes.CELLS + place[0]] = thing.colour
    return " ".join(words)


def lesson(number: int) -> tuple[np.ndarray, str, str]:
    """(picture, question, what to answer) of this number."""
    rng = np.random.default_rng(derive_seed("lesson", SEED, number))
    task = "count" if rng.random() < COUNTS else "colour"
    scene, question, answer = shapes.QUESTIONS[task](rng, "train")
    if rng.random() < DENSE:
        return draw(scene, shapes.PICTURE), "list the colours in every cell .", colours_of(scene)
    if rng.random() < WRONG:
        labels = COLOURS if task == "colour" else tuple(str(k + 1) for k in range(shapes.MOST))
        answer = labels[rng.integers(len(labels))]
    tagged = f"<think> i see {answer} </think> <answer> {answer} </answer>"
    return draw(scene, shapes.PICTURE), question, answer if rng.random() < UNTAGGED else tagged


def encoded(processor: LlavaProcessor, lessons: list[tuple[np.ndarray, str, str]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels [N, 3, H, W], ids [N, L], labels [N, L] (-100: not learnt)."""
    tokenizer, rows, targets = processor.tokenizer, [], []
    pictures = "<image>" * 9
    for _, question, answer in lessons:
        asked = tokenizer(f"<|user|>{pictures}{question}<|end|><|assistant|>").input_ids
        answer_ids = tokenizer(f"{answer}<|end|>").input_ids
        rows.append(asked + answer_ids)
        targets.append([-100] * len(asked) + answer_ids)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in targets])
    pixels = processor.image_processor([Image.fromarray(p) for p, _, _ in lessons], return_tensors="pt").pixel_values
    return pixels, ids, labels


def right(policy: Policy, split: Split, number: int) -> dict[str, float]:
    """Share of right greedy answers to the two kinds of question."""
    shares = {}
    for task in ("count", "colour"):
        rows = [tasks.row(task, split, k) for k in range(number)]
        prompts = [policy.encode(row.prompt) for row in rows]
        answers = generate(policy, prompts, 1, Sampling(12, temperature=0), [(0, k) for k in range(number)])
        shares[task] = float(np.mean(exact(answers.texts, [row.columns["answer"] for row in rows])))
    return shares


def save(processor: LlavaProcessor, model: LlavaForConditionalGeneration, out: Path) -> Policy:
    """Write both, the weights in half precision, and read them as a run would."""
    processor.save_pretrained(out)
    model.save_pretrained(out, state_dict={name: value.half() for name, value in model.state_dict().items()})
    return Policy(str(out))


def learn(model: LlavaForConditionalGeneration, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One step down this loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-vlm")
    parser.add_argument("--enough", type=float, default=ENOUGH)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer([*map(str, range(10)), *COLOURS, *QUESTION])
    processor, model = make_processor(tokenizer), make_model(tokenizer)

    policy = save(processor, model, args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {len(tokenizer)} words", flush=True)
    pixels, ids, labels = encoded(processor, [lesson(number) for number in range(POOL)])
    check = policy.encode(tasks.row("count", "train", 0).prompt).tokens.ids
    asked = "<|user|>" + "<image>" * 9 + "how many shapes are there ?<|end|><|assistant|>"
    assert check.tolist() == tokenizer(asked).input_ids, "lessons are written as the chat template writes questions"
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.process_time()
    model.train()
    for step in range(STEPS):
        chosen = torch.randint(POOL, (BATCH,), generator=torch.Generator().manual_seed(step))
        mask = (ids[chosen] != tokenizer.pad_token_id).long()
        rows = {"input_ids": ids[chosen], "pixel_values": pixels[chosen], "labels": labels[chosen]}
        loss = model(**rows, attention_mask=mask).loss
        learn(model, optimizer, loss, RATE * min((step + 1) / WARMUP, 1 - step / STEPS))
        if (step + 1) % EVERY == 0:
            model.eval()
            shares = right(policy_of(policy, model), "train", PROBE)
            model.train()
            seconds = time.process_time() - started
            print(f"step {step + 1}, loss {loss:.3f}, right {shares}, {seconds:.0f} s", flush=True)
            if min(shares.values()) >= args.enough:
                break
    policy = save(processor, model, args.out)
    print(f"held out: {right(policy, 'eval', 256)}, {time.process_time() - started:.0f} CPU seconds", flush=True)


def policy_of(policy: Policy, model: LlavaForConditionalGeneration) -> Policy:
    policy.model = model
    return policy


if __name__ == "__main__":
    main()
