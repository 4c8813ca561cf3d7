"""What a method for token policies is made of: named choices with their constants, and nothing else. No torch.

A `Preset` is one row of the table of published methods (`presets.py`). Every choice is a section of the configuration
with a `name`, so that a preset is plain data which YAML can hold. What the choices compute is in
`genrl.objectives.token_*`; `genrl.vlm.methods.policy_loss` composes them. A constant that is an argument of the named
function means what it means there. Tensors that a choice reads from `TokenBatch.extra` ([B, T] unless said otherwise)
are in [brackets].

These functions have in common a name, constants, and the tensors that they read. They compute themselves from a batch,
by functions of `genrl.objectives`, which are imported when the first one is called: `genrl check` reads a recipe
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from genrl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.vlm.rollout.token_batch import TokenBatch

Factor = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]  # in [0, 1]


class lazily:  # noqa: N801 used like a function
    """A module that is imported when something is first read of it."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        # Looked up every time: `import_module` finds a loaded module in a dictionary, and tests may replace a function.
        return getattr(import_module(self.module), name)


class Choice(Section):
    """A function of a method, by name, and its constants. The mathematics is in `genrl.objectives`."""

    tensors: ClassVar[tuple[str, ...]] = ()
    """What it reads beside rewards and log-probabilities: "ref" is `TokenBatch.ref_log_prob`, others are in `extra`.
    "old": log-probabilities before the update outside of the ratio; "bound": log-probabilities that are estimates."""

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        """`tensors`, as far as its constants ask for them."""
        return self.tensors

    def prepared(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Tensors of rows by name that its loss reads of a whole rollout batch whose advantages are estimated."""
        return {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Let a name mean what its class does."""
        cls.model_fields["name"].description = " ".join((cls.__doc__ or "").split())
