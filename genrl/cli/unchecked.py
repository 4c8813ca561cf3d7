"""What `genrl check` leaves unsaid of a run, so that nobody takes a valid file for a run that works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrl_rewards.given import is_given

if TYPE_CHECKING:
    from genrl.config import RunConfig


def unchecked(config: RunConfig, *, rows: bool, memory: bool) -> Iterator[str]:
    """Each thing that only training finds out. rows: those of the data were gone over; memory: it was estimated."""
    from genrl.data.prompts import is_data_set

    if config.base is not None and not is_given(config.base):
        here = Path(config.base).expanduser().exists()
        yield f"whether the weights of {config.base} load" if here else f"weights and licence of {config.base}"
    run: Any = config
    if names := [reward.name for reward in getattr(run, "rewards", ())]:
        yield f"whether the rewards load and run ({', '.join(names)})"
    data = getattr(run, "prompts", None) or getattr(run, "task", None)
    named = [getattr(data, key, None) for key in ("train", "eval")] if not rows else []
    for source in named:
        if isinstance(source, str) and not is_given(source) and is_data_set(source):
            yield f"rows of {source}"
    if (environment := getattr(run, "environment", None)) is not None:
        yield f"whether {environment.name} runs"
    if not memory:
        yield "memory"
    elif config.kind == "diffusion":
        from genrl.cli.diffusion import components_of

        if any(part.name == "unet" for part in components_of(run, ask=True)):
            yield "memory of a UNet's activations"
    yield "time, and room on the disk"
