"""What a method for policies in simulation declares of itself beside its keys: the facts that shared code asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.method import Kind, Method

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig

Row = tuple[str, str, str]
"""A row of `genrl check`: what, how many, of what."""


class VLAMethod(Method):
    """Base of the settings of methods that train a policy in simulation."""

    kind: ClassVar[Kind] = "vla"
    one_process: ClassVar[bool] = False
    """Its data and critics are not shared out to several processes, so that it runs in one."""
    imitates: ClassVar[Literal["never", "new", "always"]] = "never"
    """Whether it trains on the demonstrations: never, only a policy that is new, or always."""
    makes_policy: ClassVar[bool] = False
    """A new policy is made by `new_policy(config)` of its module, from data of its own, not from demonstrations."""
    acts_through: ClassVar[str] = ""
    """What its policy needs beside itself to act, so that it cannot be evaluated alone; empty = nothing."""
    acts_on_actors: ClassVar[bool] = False
    """With `environment.workers: ray` it acts by copies of the policy on Ray actors."""
    takes_older_samples: ClassVar[bool] = False
    """Whether a rollout may be of the weights of earlier iterations (`environment.staleness`)."""
    whole_chain: ClassVar[bool] = False
    """It trains every denoising step without sampling any: it needs no noise head, and no frozen policy that does the
    first steps of DPPO's chain."""
    trains: ClassVar[tuple[str, ...]] = ("velocity", "noise")
    """Which policies, by what they predict (`vla_names.PREDICTS`)."""

    @property
    def retries(self) -> bool:
        """Whether an iteration in which memory runs out is done again in smaller passes of the policy."""
        return False

    def critic_values(self, horizon: int) -> int:
        """How many values the critic gives of an observation, for chunks of `horizon` actions; 0: there is none."""
        return 0

    def refuse_processes(self, processes: int) -> None:
        """Raise ValueError where so many processes cannot share its work."""
        if self.one_process and processes > 1:
            raise ValueError(f"trainer.algorithm: {self.algorithm} runs in one process, not in {processes}")

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """What an iteration does, for `genrl check`; chunk: executed actions of a decision, None where not known."""
        return []
