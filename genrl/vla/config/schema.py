"""The configuration of a run that trains a policy in simulation, and what its method declares beside its keys.

The two refer to each other: a run has a method, and a method is asked about a run. The sections are in `sections`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from genrl.config.errors import Finding
from genrl.config.method import ByName, Method
from genrl.config.run_config import FileFinding, RunConfig
from genrl.config.section import Count
from genrl.vla.config.sections import (
    Demonstrations,
    Diffusion,
    Environment,
    Evaluation,
    FlowCPS,
    FlowNoise,
    FlowSDE,
    Policy,
    PolicyOptimizer,
    Regression,
    ReinFlow,
    Tokens,
)

Row = tuple[str, str, str]
"""A row of `genrl check`: what, how many, of what."""


class VLAMethod(Method):
    """Base of the settings of methods that train a policy in simulation."""

    kind = "vla"
    one_process: ClassVar[bool] = False
    """Its data and critics are not shared out to several processes, so that it runs in one."""
    imitates: ClassVar[Literal["never", "new", "always"]] = "new"
    """Whether demonstrations are what it trains on: always (then every denoising step is trained without being sampled,
    with no noise head, and no frozen policy for the first ones of DPPO's chain); only for a policy that is new; or
    never, and a new policy is made by `new_policy(config)` of its module, from data of its own."""
    acts_through: ClassVar[str] = ""
    """What its policy needs beside itself to act, so that it cannot be evaluated alone; empty = nothing."""
    trains: ClassVar[tuple[str, ...]] = ("velocity", "noise")
    """Which policies, by what they predict (`names.PREDICTS`)."""

    @property
    def retries(self) -> bool:
        """Whether an iteration in which memory runs out is done again in smaller passes of the policy."""
        return False

    @property
    def rows_per_pass(self) -> int | None:
        """Decisions, or frames, that go through the policy at a time in training; None = not known."""
        return None

    def critic_values(self, horizon: int) -> int:
        """How many values the critic gives of an observation, for chunks of `horizon` actions; 0: there is none."""
        return 0

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """What an iteration does, for `genrl check`; chunk: executed actions of a decision, None where not known."""
        return []


def not_trained(trainer: VLAMethod, predicts: str) -> str:
    """Why a method cannot train a policy that predicts so, and what can."""
    if predicts == "actions":
        why, near = "a policy that computes its actions has no likelihood", "sft, or a policy of flows or tokens"
    else:
        why, near = "it works on denoising steps", "sft, dagger, grpo or ppo"
    return f"{trainer.algorithm} cannot train a policy that predicts {predicts}: {why}; take {near}"


class VLAConfig(RunConfig):
    """One training run of a policy in simulation."""

    kind = "vla"
    library: ClassVar[str] = "lerobot"

    policy: Policy
    """Which policy is trained."""
    environment: Environment
    """Where it acts."""
    demonstrations: Demonstrations | None = None
    """What supervised training imitates."""
    sampler: Annotated[
        FlowSDE | FlowCPS | FlowNoise | ReinFlow | Diffusion | Tokens | Regression,
        Field(discriminator="kind"),
    ] = FlowSDE()
    """How chunks are sampled: which steps of the denoising are random, and how much; or action tokens."""
    trainer: Annotated[VLAMethod, ByName(), SerializeAsAny()]
    """Which algorithm, and its settings."""
    optimizer: PolicyOptimizer = PolicyOptimizer()
    """The optimiser and its schedule."""
    evaluation: Evaluation = Evaluation()
    """When and how the policy is judged."""
    iterations: Count = 30
    """Rounds of acting and training."""

    @property
    def base(self) -> str | None:
        """Folder of the policy; None for a new one."""
        return self.policy.path

    @property
    def trains_shards(self) -> bool:
        """Whether what is trained is in shards."""
        return bool(self.distributed.fsdp) and self.policy.lora is None

    @property
    def age(self) -> tuple[str, int]:
        """The key that says how old samples may be, and what it says."""
        return "environment.staleness", self.environment.staleness

    def problems(self) -> Iterator[Finding]:
        """Settings that cannot work together."""
        env, trainer = self.environment, self.trainer
        if (self.policy.path is None) == (self.policy.new is None):
            text = "write one of them, the folder of a policy or a new one to be trained; null takes the other out"
            yield ("policy.path", "policy.new"), text
        if self.sampler.predicts not in trainer.trains:
            yield ("trainer.algorithm", "sampler.kind"), not_trained(trainer, self.sampler.predicts)
        if env.success_key is None and env.reward == "success":
            text = "nothing would ever be paid without one; write reward: environment"
            yield ("environment.success_key", "environment.reward"), text
        if env.num_envs % env.group_size:
            yield ("environment.num_envs", "environment.group_size"), "the groups must be complete: a multiple"
        if env.staleness and "older_samples" not in trainer.takes:
            text = f"{trainer.algorithm} does not learn from rollouts of earlier weights; write 0"
            yield ("environment.staleness", "trainer.algorithm"), text
        yield from self._processes()
        if self.policy.new is not None:
            yield from self.policy.new.problems(self.sampler.predicts)
        yield from self.sampler.problems()
        yield from self.trainer.problems(self)
        yield from super().problems()

    def _processes(self) -> Iterator[Finding]:
        """Shards and groups of processes: without these rules processes wait for each other for ever."""
        if not self.distributed.fsdp:
            return
        key = "distributed.fsdp"
        if self.environment.staleness:
            yield (key, "environment.staleness"), "is not there for policies in shards; write 0"
        if self.trainer.retries:
            text = "a process that leaves a pass for want of memory leaves the others waiting; find microbatch by hand"
            yield ("trainer.fit_batch", key), text
        if self.environment.workers == "ray" and "actors" in self.trainer.takes:
            text = "Ray actors act with copies of the policy, and no process has all of it; write ray_simulators"
            yield ("environment.workers", key), text

    def file_problems(self, notes: list[str]) -> Iterator[FileFinding]:
        """What is wrong with the policy's folder, the demonstrations and the simulator."""
        from genrl.vla.config.files import file_problems

        return file_problems(self, notes)
