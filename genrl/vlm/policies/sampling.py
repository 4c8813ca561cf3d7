"""What policies over tokens of their own (pictures, shapes, sound, masks) share: how answers are sampled, rows
padded and questions encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.vlm.policies.policy import Encoded
from genrl.vlm.policies.processor import Prompt, Tokens


@dataclass(frozen=True)
class Sampled:
    """n answers to each of N prompts, B = N n rows, those of a prompt together.

    tokens int64 [B, T]; mask bool: T wide, or as wide as the log-probabilities are; log_prob float32 as mask, of the
    sampler, None where it has none; cut: rows that reached the longest length; texts: B; made: what the rewards get of
    them, by the names of their parameters, a tensor or list of B.
    """

    tokens: Tensor
    mask: Tensor
    log_prob: Tensor | None
    cut: Tensor
    texts: list[str]
    made: dict[str, Any]


def chosen(log_p: Tensor, uniform: Tensor | None) -> Tensor:
    """The id [B] where `uniform` float64 [B] falls in the cumulated probabilities of log_p [B, V]; None: the most
    probable."""
    if uniform is None:
        return log_p.argmax(1)
    cumulated = log_p.double().exp().cumsum(1)
    # right=True: never an id of probability 0, whose cumulated value is that of the one before it
    place = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
    return place[:, 0].clamp(max=log_p.shape[1] - 1)


def uniforms(keys: Sequence[Sequence[int | str]], n: int, *shape: int) -> Tensor:
    """float64 [N n, *shape] in [0, 1): n rows for each key, a function of the key and the row's number k < n alone."""
    return torch.stack(
        [torch.rand(shape, generator=generator(*key, k), dtype=torch.float64) for key in keys for k in range(n)]
    )


def left_padded(prompts: Sequence[Encoded], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both int64 [B, P], padded on the left to the longest prompt."""
    longest = max(prompt.length for prompt in prompts)
    pad = [longest - prompt.length for prompt in prompts]
    ids = torch.stack(
        [torch.nn.functional.pad(p.tokens.ids, (k, 0), value=pad_id) for p, k in zip(prompts, pad, strict=True)]
    )
    return ids, (torch.arange(longest) >= torch.tensor(pad)[:, None]).long()


def encode_text(tokenizer: Any, prompt: Prompt, refusal: str) -> Encoded:
    """A prompt's tokens, by the chat template where there is one. ValueError (`refusal`) for one with pictures."""
    if any(not isinstance(part, str) for part in prompt.parts):
        raise ValueError(f"{prompt.where}: {refusal}")
    text = " ".join(str(part) for part in prompt.parts)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        if prompt.system is not None:
            chat.insert(0, {"role": "system", "content": prompt.system})
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return Encoded(Tokens(ids, {}, {}), torch.arange(len(ids)), len(ids), prompt.where)


def check_places(prompts: Sequence[Encoded], new_tokens: int, room: int) -> None:
    """Raises ValueError where a prompt and so many tokens are more than the model's places."""
    for prompt in prompts:
        if prompt.length + new_tokens > room:
            raise ValueError(f"{prompt.where}: {prompt.length} + {new_tokens} tokens; the model has {room} places")
