"""What a policy over tokens is, beside the vision-language models of `policy`: pictures by tokens, codes, unmasking;
and what these share: how answers are sampled, rows padded and questions encoded.

A policy of your own is a class with these members, named by `vlm.output: path/file.py:Name` or by an entry point of the
group `genrl.policies`. It then trains, is evaluated, saved and resumed as those built in. One that only changes how a
vision-language model is loaded or scored derives from `policy.Policy` and overrides `open` or what it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.policy import Encoded
from genrl.vlm.policies.processor import Prompt, Tokens

if TYPE_CHECKING:
    from genrl.vlm.policies.log_probs import TokenScores


@runtime_checkable
class SequencePolicy(Protocol):
    """A model whose answers it samples itself.

    model: a transformers model, whose trained weights are `parameters`; tokenizer and processor: what is saved beside
    it, processor None where it has none. peft: the PEFT model of a LoRA, or None. device: where it runs.
    samples: estimates of a bound that stand for an answer's log-probability (`VLMMethod.reads`), else None.
    """

    sees: ClassVar[bool]
    """Whether its prompts may have pictures."""
    greedy: ClassVar[bool]
    """Whether its most probable answer is what evaluation asks for; else it is a sample at training's temperature."""
    model: Any
    tokenizer: Any
    processor: Any
    peft: Any
    device: torch.device
    samples: int | None

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Any:
        """The model in `path`, with the LoRA of `config.vlm`. Raises ValueError for what it cannot load."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""

    def encode(self, prompt: Prompt) -> Encoded:
        """A prompt as the model takes it. Raises ValueError for one that it cannot."""

    def check_room(self, prompts: Sequence[Encoded], new_tokens: int) -> None:
        """Raises ValueError where a prompt and an answer of `new_tokens` are more than the model can."""

    def sample(
        self, prompts: Sequence[Encoded], group_size: int, temperature: float, keys: Sequence[Sequence[int | str]]
    ) -> Sampled:
        """Answers, group_size to each prompt, each a function of the weights, its prompt and its key; temperature 0 is
        greedy."""

    def log_probs(
        self,
        prompts: Sequence[Encoded],
        tokens: Tensor,
        mask: Tensor,
        *,
        group: Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Scores of answers `tokens` int64 [B, T], row b to prompts[group[b]]: log_prob [B, T] float32, 0 where masked,
        equal bit for bit to those of a moment before where no weight was changed."""


@runtime_checkable
class Estimating(Protocol):
    """A policy whose log-probabilities are estimates from random numbers, with this member too."""

    round: tuple[int | str, ...]
    """Keys of these numbers, which `sample` sets. A dump keeps them, so that a replay draws the same."""


def members() -> list[str]:
    """The names of all of them."""
    return sorted({*SequencePolicy.__annotations__, *(n for n in vars(SequencePolicy) if not n.startswith("_"))})


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
    # In float64: float32 knows 16 million numbers, so that rarer tokens would never be drawn.
    return torch.stack(
        [torch.rand(shape, generator=generator(*key, k), dtype=torch.float64) for key in keys for k in range(n)]
    )


def left_padded(prompts: Sequence[Encoded], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both int64 [B, P], padded on the left to the longest prompt."""
    longest = max(prompt.length for prompt in prompts)
    # On the left, so that the answers of all rows begin at one place.
    pad = [longest - prompt.length for prompt in prompts]
    ids = torch.stack(
        [torch.nn.functional.pad(p.tokens.ids, (k, 0), value=pad_id) for p, k in zip(prompts, pad, strict=True)]
    )
    return ids, (torch.arange(longest) >= torch.tensor(pad)[:, None]).long()


def encode_text(tokenizer: Any, prompt: Prompt, refusal: str) -> Encoded:
    """A prompt's tokens, by the chat template where there is one. ValueError (`refusal`) for one with pictures, and for
    a conversation without a template."""
    if any(not isinstance(part, str) for part in prompt.pieces):
        raise ValueError(f"{prompt.where}: {refusal}")
    chat = [{"role": turn.role, "content": " ".join(map(str, turn.parts))} for turn in prompt.turns]
    if prompt.system is not None:
        chat.insert(0, {"role": "system", "content": prompt.system})
    if not tokenizer.chat_template and len(chat) > 1:
        text = "this model's tokenizer has no chat template: ask by one text, without task.system and other messages"
        raise ValueError(f"{prompt.where}: {text}")
    text = chat[0]["content"]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text + prompt.begun, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return Encoded(Tokens(ids, {}, {}), torch.arange(len(ids)), len(ids), prompt.where)


def check_places(prompts: Sequence[Encoded], new_tokens: int, room: int) -> None:
    """Raises ValueError where a prompt and so many tokens are more than the model's places."""
    for prompt in prompts:
        if prompt.length + new_tokens > room:
            raise ValueError(f"{prompt.where}: {prompt.length} + {new_tokens} tokens; the model has {room} places")
