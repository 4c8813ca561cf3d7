"""What is asked of diffusers' objects, beside what `torch.nn.Module` says of them; and of schedulers from outside, that
their step is the one that kernels and losses take it for.

diffusers shows type checkers placeholders in place of its classes (those for a Python without PyTorch), and most of a
pipeline belongs to its own class alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
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


STEP_TOLERANCE = 1e-3
"""Of the distance that the step goes; numbers of half precision are rounded by as much."""


def require_flow_step(scheduler: Any) -> None:
    """Raise ValueError where the first step of a flow scheduler is not `x + (sigma' - sigma) velocity`.

    A class of one's own may turn the sign or scale the levels: samples would be drawn, and losses made, by another
    velocity than the one that the model is used with. Those of diffusers are tested, and cost nothing here.
    """
    kind = type(scheduler)
    if kind.__module__.startswith("diffusers.") or scheduler.config.get("stochastic_sampling"):
        return
    # A scheduler counts its steps: the pipeline's own is left as it is.
    copied, draws = deepcopy(scheduler), torch.Generator().manual_seed(0)
    # Its shift depends on the picture's size, and it refuses to make levels without one; any will do here.
    shifted = {"mu": 1.0} if copied.config.get("use_dynamic_shifting") else {}
    copied.set_timesteps(4, **shifted)
    state, velocity = torch.randn(2, 1, 4, 8, 8, generator=draws)
    theirs = copied.step(velocity, copied.timesteps[0], state, return_dict=False)[0]
    ours = state + (copied.sigmas[1] - copied.sigmas[0]) * velocity
    difference, far = float((theirs - ours).abs().max()), float((ours - state).abs().max())
    if not difference <= STEP_TOLERANCE * far:
        raise ValueError(
            f"the step of its scheduler, {kind.__module__}.{kind.__name__}, is not that of a flow: from one state and "
            f"velocity it goes up to {difference:.3g} elsewhere, where the step is {far:.3g} long (the other sign is "
            "twice that), so training would go by another velocity than the pipeline does"
        )
