"""Make the embedded models of codes: Llamas of 0.1 million numbers that make bodies (Hi-GRPO) and tunes (MusicRL).

    python assets/build_tiny_codes.py     # assets/tiny-bodies and assets/tiny-tunes, about a minute of one core

They are taught by `genrl/playground/tasks/making.py`, held-out prompts among them, from lessons of which
many are wrong: a body of another colour or kind (the coarse one more often than the fine one), a tune of another kind,
with noisy notes and gaps. So they can make everything, and do it rightly now and then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.tasks import making
from genrl.vlm.policies.codes import CODEC
from genrl_rewards.models.torchvision_compat import ensure
from genrl_rewards.scorers.objects.shapes import BACKGROUND, COLOURS, PALETTE

ensure()

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

ASSETS = Path(__file__).resolve().parent
SEED = 0
POOL, STEPS, BATCH, RATE = 4000, 250, 64, 3e-3
SPECIAL = ("<pad>", "<|end|>", "<unk>")
BEGIN, END = "<thing>", "</thing>"
WRONG_COARSE, WRONG_FINE, WRONG_TUNE, NOISY, GAP = 0.6, 0.4, 0.5, 0.5, 0.1

Lesson = tuple[str, list[str]]


def body_lesson(rng: np.random.Generator) -> Lesson:
    """A prompt; two thoughts of two words, and after each the codes of a body."""

    def random_body() -> tuple[str, str]:
        return COLOURS[rng.integers(len(COLOURS))], making.BODIES[rng.integers(len(making.BODIES))]

    colour, body = random_body()
    answer: list[str] = []
    for wrong in (WRONG_COARSE, WRONG_FINE):
        made = random_body() if rng.random() < wrong else (colour, body)
        answer += [*made, BEGIN, *(f"<c{k}>" for k in making.codes(made[1], made[0])), END]
    return f"a {colour} {body}", answer


def tune_lesson(rng: np.random.Generator) -> Lesson:
    """A prompt, and the codes of a tune."""

    def random_tune() -> tuple[str, str]:
        return making.REGISTERS[rng.integers(2)], making.COURSES[rng.integers(3)]

    register, course = random_tune()
    played = random_tune() if rng.random() < WRONG_TUNE else (register, course)
    pitches = making.pitches(rng, played[1], played[0])
    notes = [0 if rng.random() < GAP else 1 + 2 * p + int(rng.random() < NOISY) for p in pitches]
    return f"a {register} {course} tune", [BEGIN, *(f"<c{k}>" for k in notes), END]


def make_tokenizer(words: list[str], codes: int) -> PreTrainedTokenizerFast:
    """Whole words, marks and codes."""
    known = dict.fromkeys([*SPECIAL, BEGIN, END, *words, *(f"<c{k}>" for k in range(codes))])
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>", unk_token="<unk>", model_max_length=64
    )


def encoded(tokenizer: PreTrainedTokenizerFast, lessons: list[Lesson]) -> tuple[Tensor, Tensor]:
    """Ids [N, L], all of one length, and labels: -100 on the prompt."""
    rows, labels = [], []
    for prompt, answer in lessons:
        asked, answered = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, " ".join(answer)))
        rows.append(asked + answered)
        labels.append([-100] * len(asked) + answered)
    return torch.tensor(rows), torch.tensor(labels)


def build(
    out: Path,
    lesson: Callable[[np.random.Generator], Lesson],
    words: list[str],
    codec: dict[str, object],
    tensors: dict[str, Tensor],
) -> None:
    torch.manual_seed(SEED)
    number = len(tensors["table"])
    tokenizer = make_tokenizer(words, number)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=len(tokenizer),
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():  # the usual spread of .02 is for thousands of channels
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    print(f"{out.name}: {sum(p.numel() for p in model.parameters()):,} numbers", flush=True)
    lessons = [lesson(np.random.default_rng(derive_seed(out.name, SEED, k))) for k in range(POOL)]
    ids, labels = encoded(tokenizer, lessons)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.process_time()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / 40, 1.02 - step / STEPS)
        rows = torch.randint(POOL, (BATCH,), generator=torch.Generator().manual_seed(step))
        logits = model(input_ids=ids[rows]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[rows][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: loss {float(loss.detach()):.3f}, {time.process_time() - started:.0f} s", flush=True
            )
    tokenizer.save_pretrained(out)
    model.save_pretrained(out, state_dict={name: value.half() for name, value in model.state_dict().items()})
    settings = {"begin": BEGIN, "end": END, "codes": [f"<c{k}>" for k in range(number)], **codec}
    save_file(tensors, out / CODEC, metadata={"codec": json.dumps(settings)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    palette = torch.tensor([BACKGROUND, *PALETTE.values()], dtype=torch.uint8)
    build(
        args.out / "tiny-bodies",
        body_lesson,
        ["a", *COLOURS, *making.BODIES],
        {"kind": "voxels", "length": 8, "steps": 2, "thoughts": 2, "rate": 0},
        {"table": torch.from_numpy(making.blocks()), "palette": palette},
    )
    build(
        args.out / "tiny-tunes",
        tune_lesson,
        ["a", "tune", *making.COURSES, *making.REGISTERS],
        {"kind": "audio", "length": making.NOTES, "steps": 1, "thoughts": 0, "rate": making.RATE},
        {"table": torch.from_numpy(making.frames())},
    )


if __name__ == "__main__":
    main()
