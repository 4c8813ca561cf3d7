"""What methods that learn from data refuse, and what they say of an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.vla.config.names import WORLDS
from genrl.vla.config.schema import Row

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig

FROM_DATA: Row = ("learns", "from data", "see docs/vla_offline.md")


def from_demonstrations(config: VLAConfig, algorithm: str) -> Iterator[Finding]:
    """Methods that imitate need exactly one source of demonstrations."""
    demonstrations = config.demonstrations
    if demonstrations is None or (demonstrations.expert is None) == (demonstrations.dataset is None):
        text = "imitates: write `expert: N`, or `dataset: FOLDER`, and not both (null takes one out)"
        yield ("demonstrations",), f"{algorithm} {text}"


def on_the_table(config: VLAConfig, algorithm: str, *, diffusion: bool = False) -> Iterator[Finding]:
    """Methods that make their own data on MiniTable, from states, for a new policy."""
    if config.environment.name not in WORLDS.built_in:
        yield ("environment.name",), f"{algorithm} makes its own data; write {' or '.join(WORLDS.built_in)}"
    yield from for_a_new_policy(config, algorithm, diffusion=diffusion)


def for_a_new_policy(config: VLAConfig, algorithm: str, *, diffusion: bool = False) -> Iterator[Finding]:
    """Methods that learn from data what a new policy of states does."""
    new = config.policy.new
    if new is None:
        yield ("policy.new",), f"{algorithm} begins with a new policy; write `new: {{...}}`"
    else:
        for key in ("image_size", "points"):
            if getattr(new, key):
                yield (f"policy.new.{key}",), f"{algorithm} works on states; write 0"
    if diffusion and new is not None and new.type != "diffusion_mlp":
        yield ("policy.new.type",), f"{algorithm} trains a diffusion policy; write diffusion_mlp"
