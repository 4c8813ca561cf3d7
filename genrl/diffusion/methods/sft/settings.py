"""Supervised fine-tuning on given pictures: the start that Talk2Move gives an editing model (arXiv 2601.02356)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.run_config import FileFinding
from genrl.data.preferences import TARGET_COLUMNS, set_problem
from genrl.diffusion.config.schema import Calls, Guided, Refusable, Updating
from genrl.diffusion.forward.settings import groups_of, matching_calls

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt, PromptRows
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.rollout.scoring import Scorers


class PipelineSFT(Updating):
    """Supervised fine-tuning: the model's own training loss on the pictures in the column target_image."""

    takes = frozenset({"no_reward"})
    refuses: ClassVar[Mapping[Refusable, str]] = {
        "distributed.context": "trains on given pictures, shared out by process",
        "sampling.buckets": "trains on given pictures, which are resized to one size",
    }
    title: ClassVar[str] = "Supervised fine-tuning of pipelines"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "sft/error": MetricDoc(
            "mean of (prediction - target)^2 at the trained noise levels: the loss",
            "Falls slowly, and not to 0: noise cannot be told from what it covers. Rising: lower `optimizer.lr`.",
            "the prediction's unit squared",
        )
    }
    trains_on = "pictures"

    algorithm: Literal["sft"] = "sft"
    """Which trainer."""

    @property
    def compares(self) -> None:
        """Each has its own target."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        yield from groups_of(1, config)

    @property
    def other_guidance(self) -> tuple[float, ...]:
        return (1.0,)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """One call for each picture, without guidance; nothing is sampled."""
        calls = float(config.sampling.images_per_iteration)
        counts = matching_calls(self, config, guided, trained=1.0, states=calls, train=calls * self.epochs)
        return counts._replace(sample=0.0)

    def check_data(self, config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
        """Rows without a target, or with one that does not fit its source picture."""
        from genrl.diffusion.forward.noising import check_given

        check_given(config, prompts, TARGET_COLUMNS)

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """A target for every prompt."""
        if wrong := set_problem(config.prompts.train, None if train is None else train.rows, TARGET_COLUMNS):
            yield ("prompts", "train"), wrong
