"""Diffusion-DPO from a preference data set (arXiv 2311.12908)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.run_config import FileFinding
from genrl.config.section import Positive
from genrl.data.preferences import set_problem
from genrl.data.rows import PREFERENCE_COLUMNS
from genrl.diffusion.config.schema import Calls, Guided, Refusable
from genrl.diffusion.forward.settings import DiffusionDPO, groups_of

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt, PromptRows
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.rollout.scoring import Scorers


class OfflineDPO(DiffusionDPO):
    """Diffusion-DPO from a preference data set in prompts.train, with the columns image_win and image_lose."""

    refuses: ClassVar[Mapping[Refusable, str]] = {
        **DiffusionDPO.refuses,
        "distributed.context": "trains on given pairs, shared out by process",
        "sampling.buckets": "trains on given pairs, which are resized to one size",
    }
    title: ClassVar[str] = "Offline DPO"
    trains_on = "pictures"

    algorithm: Literal["dpo_offline"] = "dpo_offline"
    """Which trainer."""
    beta: Positive = 5000.0
    """Sharpness of the preference (Diffusion-DPO: 5000 for SDXL, 2000 for SD 1.5)."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        yield from groups_of(2, config)  # a pair

    def calls(self, config: Config, guided: Guided) -> Calls:
        """Model calls as online, but nothing is sampled."""
        return super().calls(config, guided)._replace(sample=0.0)

    def check_data(self, config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
        """Rows without two pictures, or with some that do not fit the picture to be edited."""
        from genrl.diffusion.forward.noising import check_given

        check_given(config, prompts, PREFERENCE_COLUMNS)

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """Two pictures for every prompt."""
        if wrong := set_problem(config.prompts.train, None if train is None else train.rows):
            yield ("prompts", "train"), wrong
