"""Diffusion-DPO from a preference data set (arXiv 2311.12908): as `algorithm: dpo`, on pairs of given images.

A pair is a group of two samples: the image that is preferred, with reward 1, and the other, with reward 0. Rewards of
the configuration judge the held-out prompts only.
"""

from __future__ import annotations

from genrl.data.rows import PREFERENCE_COLUMNS
from genrl.diffusion.forward.noising import GivenPictures
from genrl.diffusion.methods.dpo.train import loss, train_on
from genrl.diffusion.methods.dpo_offline.settings import OfflineDPO
from genrl.diffusion.run import DiffusionRun

__all__ = ["loss", "train"]

PAIR = (1.0, 0.0)
"""Rewards of the preferred picture and of the other."""


def train(run: DiffusionRun, settings: OfflineDPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    train_on(run, settings, GivenPictures(run, PREFERENCE_COLUMNS, PAIR).rollouts)
