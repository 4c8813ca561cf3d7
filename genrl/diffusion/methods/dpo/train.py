"""Diffusion-DPO, online and from a preference data set (arXiv 2311.12908).

One iteration, with e = <(v_theta(x_t, t) - target)^2> the denoising error and pairs (w, l), w preferred to l:

1. collect   online: samples x_0 of each prompt from the present policy, by the deterministic solver;
             offline: pairs of images of the data set, encoded
2. compare   online: the best and the worst sample of each group, by reward; offline: as the data set has it
3. update    one t and one eps for both of a pair;  d = (e_w - e_l) - (e_w^ref - e_l^ref)
             minimise  -log sigmoid(-beta/2 d)                                                        (eq. 14)

Flows and epsilon, v and sample prediction alike: the target is what the network predicts. The reference is the model
before training, or the trained one every `reference_every` optimiser steps. docs/dpo.md has the equations,
metrics and figures.
"""

from __future__ import annotations

from genrl.diffusion.forward.noising import solved
from genrl.diffusion.forward.pairs import loss, train_on
from genrl.diffusion.methods.dpo.settings import DPO
from genrl.diffusion.run import DiffusionRun

__all__ = ["loss", "train"]


def train(run: DiffusionRun, settings: DPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    train_on(run, settings, lambda: run.collect(solved))
