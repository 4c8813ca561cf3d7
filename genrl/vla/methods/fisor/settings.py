"""FISOR, safe offline learning (arXiv 2401.10700): its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Flag, NonNegative, Positive, Share
from genrl.vla.config.names import WORLDS
from genrl.vla.config.schema import Row, VLAMethod
from genrl.vla.methods.settings import FROM_DATA, for_a_new_policy, on_the_table

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class FISOR(VLAMethod):
    """FISOR: safe offline learning, on a table where other discs must be kept away from, or from a file with costs."""

    title: ClassVar[str] = "FISOR"
    one_process: ClassVar[bool] = True
    imitates = "never"
    acts_through: ClassVar[str] = "critics, which choose among its actions"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "data/cost_mean": MetricDoc(
            "mean over episodes of the data of their cost", "What cloning them costs, about.", "the environment's own"
        ),
        "data/return_mean": MetricDoc(
            "mean over episodes of a file of their return", "What cloning them pays, about.", "the environment's own"
        ),
        "critic/v_loss": MetricDoc("expectile loss of V_r; mean over updates", "As `critic/value_loss`."),
        "critic/v_h_loss": MetricDoc(
            "reversed expectile loss of V_h; mean over updates", "Falls slowly: violations are rare and large."
        ),
        "critic/q_h_loss": MetricDoc(
            "(Q_h - reachability target)^2, both copies; mean over updates", "As `critic/v_h_loss`."
        ),
        "eval/cost_mean": MetricDoc(
            "mean over the evaluation's episodes of their cost: on the table, decisions with an action that ended in a "
            "hazard; of a file's environment, the sum of its costs",
            "To be at most `trainer.cost_limit`.",
            "the environment's own",
        ),
        "eval/violating": MetricDoc(
            "share of the evaluation's episodes with any cost", "As `eval/cost_mean`.", "share 0..1"
        ),
        "eval/normalized_return": MetricDoc(
            "(`eval/return_mean` - low) / (high - low), low and high the extreme returns of a file's episodes (DSRL)",
            "1: as good as the best episode of the data, whatever that cost.",
            "share of the data's range",
        ),
        "eval/normalized_cost": MetricDoc(
            "`eval/cost_mean` / `trainer.cost_limit`; (cost + 1) / 1 for a limit of 0 (DSRL)",
            "To be below 1.",
            "limits",
        ),
        "eval/within_limit": MetricDoc("1 where `eval/cost_mean` <= `trainer.cost_limit`", "1.", "0 or 1"),
    }

    algorithm: Literal["fisor"] = "fisor"
    """Which trainer."""
    episodes: Count = 2000
    """Episodes of the behaviour that is learned from, on the table; of a file, all."""
    target_rate: Share = 0.05
    """How fast the slow copies of the critics follow in a step (FISOR, for a million updates: 0.005)."""
    violation: Positive = 3.0
    """h of a transition with cost (FISOR: 25); without, -1. The larger it is, the more states are held infeasible."""
    temperature: Positive = 20.0
    """How strongly better actions are preferred in feasible states (FISOR: 3; rewards here are a few hundredths, and
    those of a file are scaled as in FISOR: times its longest episode, over the range of its returns)."""
    largest_cost_weight: Positive = 10.0
    """Bound of the weight of safer actions in infeasible states (FISOR: 150)."""
    candidates: Count = 16
    """Samples of which the one of least Q_h acts."""
    steps_per_iteration: Count = 250
    """Updates of critics and actor in an iteration."""
    cost_limit: NonNegative = 0.25
    """Mean cost of an episode that is allowed."""
    weighted: Flag = True
    """False: plain cloning of the data, acting by one sample, for comparison."""

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Anything but a new diffusion policy, on MiniTable or by a file of steps with costs."""
        demonstrations, env, new = config.demonstrations, config.environment, config.policy.new
        if demonstrations is None or demonstrations.dataset is None:
            yield from on_the_table(config, self.algorithm, diffusion=True)
            return
        yield from for_a_new_policy(config, self.algorithm, diffusion=True)
        if env.name in WORLDS.built_in:
            text = "a file of steps is of a gymnasium environment; name it, or take the data set out"
            yield ("environment.name", "demonstrations.dataset"), text
        if env.cost_key is None:
            yield ("environment.cost_key",), "fisor limits costs: write the entry of info that has them (cost)"
        if env.instruction is None:
            yield ("environment.instruction",), "files of steps hold no sentences; write the one of the task"
        if new is not None and new.horizon > 1:
            yield ("policy.new.horizon",), "costs of a file are those of single actions; write 1"

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Nothing that an environment does."""
        return [FROM_DATA]
