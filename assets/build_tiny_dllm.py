"""Make the embedded masked diffusion language model: a ModernBERT of 0.1 million numbers that half knows how to add.

    python assets/build_tiny_dllm.py     # assets/tiny-dllm, about half a minute of one core

It is taught the sums of `genrl/playground/tasks/series.py`, held-out ones among them, by the loss of masked diffusion
(LLaDA): a number l of the places of an answer is drawn from 1 to L, l of them are masked, and the log-probabilities of
what stands there, over l, are raised. Of the answers that it is shown `WRONG` are those of other sums. Training ends
when the share `ENOUGH` of the training sums is right, drawn greedily from left to right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.vlm.policies.masked_text import MaskedPolicy
from genrl.vlm.tasks import row
from genrl_rewards.scorers.texts.verifiable import exact

from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast  # isort: skip

ASSETS = Path(__file__).resolve().parent
SEED = 0
LENGTH = 9  # places of an answer: "3 plus 4 makes 7 <answer> 7 </answer>" and its end
STEPS, BATCH, RATE = 1200, 64, 3e-3
WRONG, ENOUGH, EVERY, PROBE = 0.35, 0.45, 50, 200
SPECIAL = ("<pad>", "<|end|>", "<unk>", "<mask>", "<|user|>", "<|assistant|>")
WORDS = "what is plus makes ? <answer> </answer>".split()
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words and numbers up to 18."""
    words = dict.fromkeys([*SPECIAL, *WORDS, *map(str, range(19))])
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        mask_token="<mask>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT,
        model_max_length=32,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> ModernBertForMaskedLM:
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
            local_attention=32,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            cls_token_id=tokenizer.eos_token_id,
            sep_token_id=tokenizer.eos_token_id,
        )
    )


def lesson(number: int) -> tuple[str, str]:
    """(question, answer)."""
    rng = np.random.default_rng(derive_seed("dllm", SEED, number))
    first, second = (int(k) for k in rng.integers(10, size=2))
    total = int(rng.integers(19)) if rng.random() < WRONG else first + second
    return f"what is {first} plus {second} ?", f"{first} plus {second} makes {total} <answer> {total} </answer> <|end|>"


def encoded(policy: MaskedPolicy, numbers: range) -> tuple[Tensor, Tensor]:
    """Prompts int64 [N, P], all of one length, and answers [N, L]."""
    tokenizer, asked, answers = policy.tokenizer, [], []
    for number in numbers:
        question, answer = lesson(number)
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        asked.append(tokenizer(text, add_special_tokens=False).input_ids)
        answers.append(tokenizer(answer, add_special_tokens=False).input_ids)
    return torch.tensor(asked), torch.tensor(answers)


def right(policy: MaskedPolicy, split: str, number: int) -> float:
    """Share of right greedy answers, from left to right."""
    rows = [row("sums", split, k) for k in range(number)]
    answers = policy.sample([policy.encode(one.prompt) for one in rows], 1, 0.0, [(0, k) for k in range(number)])
    return float(np.mean(exact(answers.texts, [one.columns["answer"] for one in rows])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-dllm")
    parser.add_argument("--enough", type=float, default=ENOUGH)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(args.out)
    make_model(tokenizer).save_pretrained(args.out)
    policy = MaskedPolicy(str(args.out), length=LENGTH, samples=None)
    with torch.no_grad():  # the usual spread of .02 is for thousands of channels
        for parameter in policy.parameters:
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    print(f"{sum(p.numel() for p in policy.parameters):,} numbers, {len(tokenizer)} words", flush=True)
    asked, answers = encoded(policy, range(8000))
    optimizer = torch.optim.AdamW(policy.parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.process_time()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / 40, 1.02 - step / STEPS)
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(asked), (BATCH,), generator=generator)
        number = torch.randint(1, LENGTH + 1, (BATCH, 1), generator=generator)
        masked = torch.rand(BATCH, LENGTH, generator=generator).argsort(1).argsort(1) < number
        filled = torch.where(masked, policy.mask_id, answers[rows])
        logits = policy.model(input_ids=torch.cat([asked[rows], filled], 1)).logits[:, -LENGTH:]
        losses = F.cross_entropy(logits.flatten(0, 1), answers[rows].flatten(), reduction="none").view(masked.shape)
        loss = ((losses * masked).sum(1) / number[:, 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            share = right(policy, "train", PROBE)
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}, right {share:.3f}", flush=True)
            if share >= args.enough:
                break
    half = {name: value.half() for name, value in policy.model.state_dict().items()}
    policy.model.save_pretrained(args.out, state_dict=half)
    print(f"held out: {right(policy, 'eval', 200):.3f}, {time.process_time() - started:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
