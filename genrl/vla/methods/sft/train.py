"""Supervised training on demonstrations: flow matching (arXiv 2210.02747), noise prediction (2006.11239), or the
policy's own loss."""

from __future__ import annotations

from torch import Tensor

from genrl.runtime.loop.recorded import Recorded
from genrl.vla.methods.sft.settings import SFT
from genrl.vla.offline.imitation import imitation_loss, imitation_updates
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun


def loss(settings: SFT, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """The part [] that these frames have in the mean loss of a batch."""
    return {"loss": imitation_loss(acting.policy, given)}


def train(run: VLARun, settings: SFT) -> None:
    """Iterations of optimiser steps on the demonstrations."""
    for _ in run.loop.iterations():
        figures = imitation_updates(run, settings, run.frames, loss)
        run.loop.finish(figures | {"lr": run.loop.lr})
