"""Diffusion-DPO from a preference data set (arXiv 2311.12908)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.run_config import FileFinding
from genrl.config.section import Positive
from genrl.data.preferences import set_problem
from genrl.diffusion.config.schema import Calls, Guided
from genrl.diffusion.forward.settings import DiffusionDPO

if TYPE_CHECKING:
    from genrl.data.prompts import PromptRows
    from genrl.diffusion.config.schema import Config


class OfflineDPO(DiffusionDPO):
    """Diffusion-DPO from a preference data set in prompts.train, with the columns image_win and image_lose."""

    not_divided: ClassVar[str] = "trains on given pairs, shared out by process"
    one_size: ClassVar[str] = "trains on given pairs, which are resized to one size"
    title: ClassVar[str] = "Offline DPO"
    reads_pictures: ClassVar[bool] = True
    checks_data: ClassVar[bool] = True
    samples_per_group: ClassVar[int | None] = 2  # a pair

    algorithm: Literal["dpo_offline"] = "dpo_offline"
    """Which trainer."""
    beta: Positive = 5000.0
    """Sharpness of the preference (Diffusion-DPO: 5000 for SDXL, 2000 for SD 1.5)."""

    def calls(self, config: Config, guided: Guided) -> Calls:
        """As online, but nothing is sampled."""
        return super().calls(config, guided)._replace(sample=0.0)

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """Two pictures for every prompt."""
        if wrong := set_problem(config.prompts.train, None if train is None else train.rows):
            yield ("prompts", "train"), wrong
