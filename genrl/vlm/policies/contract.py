"""What a policy over tokens is, beside the vision-language models of `policy`: pictures by tokens, codes, unmasking.

A policy of your own is a class with these members, named by `vlm.output: path/file.py:Name` or by an entry point of the
group `genrl.policies`. It then trains, is evaluated, saved and resumed as those built in. One that only changes how a
vision-language model is loaded or scored derives from `policy.Policy` and overrides `open` or what it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.processor import Prompt

if TYPE_CHECKING:
    from genrl.vlm.policies.log_probs import TokenScores
    from genrl.vlm.policies.policy import Encoded
    from genrl.vlm.policies.sampling import Sampled


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
