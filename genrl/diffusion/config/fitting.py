"""Which keys make a run fit on a card, in the order in which they are to be tried. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from genrl.config.errors import ConfigError
from genrl.config.loading import load
from genrl.diffusion.config.estimate import Component
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.schema import Config

CARDS = (12, 16, 24, 40, 80)
"""GB of common cards."""
SHARE = 0.92
"""Of a card's memory that a run may take: the rest is the allocator's and the libraries'."""


@dataclass(frozen=True)
class Step:
    """A change, and the peak after it and all before."""

    change: str
    """As `key=value`; empty for the configuration as it is."""
    num_bytes: int


def steps(file: Path, overrides: Sequence[str], components: tuple[Component, ...], card: float) -> list[Step]:
    """The configuration as it is, and then one change after the other until it fits on a card of so many bytes: first
    what costs time alone, then what rounds, then what changes training, at last what costs most time. Left out is what
    the configuration has, what cannot be with it, and what saves less than a hundredth."""
    config = _loaded(file, overrides)
    assert config is not None
    found, taken = [Step("", _peak(config, components))], list(overrides)
    for change in _changes(config):
        if found[-1].num_bytes <= SHARE * card:
            break
        changed = _loaded(file, [*taken, *change.split(" ")])
        if changed is None or (size := _peak(changed, components)) > 0.99 * found[-1].num_bytes:
            continue
        found.append(Step(change, size))
        taken += change.split(" ")
    return found


def fitting(found: Sequence[Step], card: float) -> list[Step] | None:
    """The shortest beginning of the steps after which a run fits on a card of so many bytes; None = not with all."""
    for end, step in enumerate(found, start=1):
        if step.num_bytes <= SHARE * card:
            return list(found[:end])
    return None


def _changes(config: Config) -> Iterator[str]:
    model, size = config.model, config.sampling.batch_size
    yield "model.offload.text_encoders=encode_then_free"
    if model.offload.text_encoders is None:
        yield "model.offload.text_encoders=between"
    yield "model.slice_vae=true"
    yield "model.gradient_checkpointing=true"
    yield "model.offload.vae=between"
    if model.dtype == "float32":
        yield "model.dtype=bfloat16 model.autocast=null"
    yield "optimizer.name=adamw_8bit"
    if model.quantize is None:
        yield "model.quantize=int8"
    while size > 1:
        size = -(-size // 2)
        yield f"sampling.batch_size={size}"
    yield "model.quantize=nf4"
    yield "model.quantize=null model.offload.denoiser=blocks"


def _loaded(file: Path, overrides: Sequence[str]) -> Config | None:
    try:
        config = load(file, list(overrides))
    except ConfigError:
        return None
    return config if isinstance(config, Config) else None


def _peak(config: Config, components: tuple[Component, ...]) -> int:
    return sum(size for _, size in memory(config, components))
