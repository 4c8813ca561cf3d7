"""PaCo-GRPO: several rewards, of which those that vary most are log-tamed (arXiv 2512.04784)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import genrl_rewards
from genrl.config.errors import Finding
from genrl.config.run_config import FileFinding
from genrl.diffusion.steps.settings import Windowed, plain_scores

if TYPE_CHECKING:
    from genrl.data.prompts import PromptRows
    from genrl.diffusion.config.schema import Config


class PaCoGRPO(Windowed):
    """PaCo-GRPO (arXiv 2512.04784): rewards that vary more than the others are tamed by a logarithm."""

    title: ClassVar[str] = "PaCo-GRPO"
    takes = frozenset({"recorded_calls", "older_samples", "part_of_groups"})

    algorithm: Literal["paco_grpo"] = "paco_grpo"
    """Which trainer."""
    aggregate: Literal["log_tame", "log_tame_released"] = "log_tame"
    """Several rewards to one advantage: of the sum in which those that vary most are log(1 + r) (the paper), or that
    sum itself (its code; advantage_scale: none)."""

    @property
    def compares(self) -> Literal["groups"] | None:
        return None if self.aggregate == "log_tame_released" else "groups"

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        if self.aggregate == "log_tame_released" and self.advantage_scale != "none":
            yield ("trainer.advantage_scale", "trainer.aggregate"), f"{self.aggregate} divides by nothing; use none"
        yield from plain_scores(config, self.aggregate)
        for index, reward in enumerate(config.rewards):
            if reward.weight != 0 and reward.gate is not None and reward.gate.otherwise <= -1:
                text = f"{self.aggregate} takes ln(1 + r), which is undefined at {reward.gate.otherwise:g}"
                yield (f"rewards.{index}.gate.otherwise", "trainer.aggregate"), f"{text}; use a number above -1"

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """ln(1 + r) is taken of whichever reward varies most, so none of several may fall to -1."""
        trained = [index for index, reward in enumerate(config.rewards) if reward.weight != 0]
        for index in trained if len(trained) > 1 else ():  # one alone is never tamed
            name = config.rewards[index].name
            try:
                bounds = genrl_rewards.declaration(genrl_rewards.resolve(name)).range
            except ValueError:
                continue  # told in its own place
            least = genrl_rewards.lower_end(bounds)
            if least is not None and least <= -1:
                text = f"{self.aggregate} takes ln(1 + r), and the scores of {name} may be -1 or less (range: {bounds})"
                instead = "use algorithm flow_grpo with aggregate gdpo or sum, or a file of your own that shifts them"
                yield ("rewards", index, "name"), f"{text}; {instead}"
