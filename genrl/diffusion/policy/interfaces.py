"""What is asked of diffusers' objects, beside what `torch.nn.Module` says of them.

diffusers shows type checkers placeholders in place of its classes (those for a Python without PyTorch), and most of a
pipeline belongs to its own class alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, Protocol, Self, runtime_checkable

import torch


class Pipeline(Protocol):
    """A diffusers pipeline. `prepare_latents` and `encode_prompt` are not those of every pipeline: `Policy` looks."""

    scheduler: Any
    prepare_latents: Callable[..., Any]
    encode_prompt: Callable[..., Any]

    @property
    def _execution_device(self) -> Any:
        """Device on which a call computes."""

    @property
    def components(self) -> dict[str, Any]:
        """Models, tokenizers and the scheduler, by name; None where an optional one is left out."""

    def to(self, device: torch.device | str, /) -> Self:
        """Move every model; returns the pipeline itself."""

    def set_progress_bar_config(self, *, disable: bool) -> None:
        """Whether a call shows a bar."""

    def save_pretrained(self, folder: str | PathLike[str], /) -> None:
        """Write it as a folder that diffusers loads."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draw pictures."""


@runtime_checkable
class Decoder(Protocol):
    """A component that makes pictures of states: its methods may be replaced on the instance."""

    decode: Callable[..., Any]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its weights."""


@runtime_checkable
class Autoencoder(Decoder, Protocol):
    """A decoder with its inverse."""

    encode: Callable[..., Any]


@runtime_checkable
class Checkpointing(Protocol):
    """A network that can compute its activations twice instead of keeping them."""

    def enable_gradient_checkpointing(self) -> None:
        """Compute activations again in backward passes, from here on."""


@runtime_checkable
class LoRALoader(Protocol):
    """A pipeline that reads and writes LoRA adapters of its components."""

    @classmethod
    def save_lora_weights(cls, folder: str | PathLike[str], /, **layers: Any) -> None:
        """Write the layers of its components, as `get_peft_model_state_dict` gives them, and their metadata."""

    def load_lora_weights(self, source: str, /, **options: Any) -> None:
        """Load a folder or hub id beside what is there."""

    def fuse_lora(self, components: list[str]) -> None:
        """Merge the adapters of these components into their weights."""

    def unload_lora_weights(self) -> None:
        """Drop all adapters."""


@runtime_checkable
class Adapted(Protocol):
    """A model with LoRA adapters."""

    peft_config: dict[str, Any]
    """Of each adapter, peft's `LoraConfig`."""


@runtime_checkable
class AdaptedDenoiser(Adapted, Protocol):
    """A denoiser with LoRA adapters, as diffusers' `PeftAdapterMixin` has them."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its weights."""

    def set_adapter(self, name: str | list[str], /) -> None:
        """Use this adapter, or these, alone."""

    def save_lora_adapter(self, folder: str, /, *, adapter_name: str) -> None:
        """Write an adapter without the pipeline, for `load_lora_adapter`."""

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Parameters of the model and its adapters."""

    def delete_adapters(self, name: str, /) -> None:
        """Remove an adapter."""
