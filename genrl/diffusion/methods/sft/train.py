"""Supervised fine-tuning of a pipeline on (conditions, picture): the loss that its model was made by.

One iteration:

1. read      the pictures x_0 of the next rows, as states of the pipeline
2. update    x_s = (1 - s) x_0 + s eps, s logit-normal for each picture;  minimise <(v_theta(x_s, s) - (eps - x_0))^2>

or, where the model is no flow, what it predicts at a uniform timestep. What the pipeline is conditioned on comes from
the row: the prompt, and for an editing model the source picture. Talk2Move starts from 800, 43 and 110 such pairs for
moving, turning and resizing (arXiv 2601.02356). Rewards of the configuration judge the held-out prompts only.
"""

from __future__ import annotations

import torch

from genrl.data.preferences import TARGET_COLUMNS
from genrl.diffusion.forward.noising import GivenPictures, Tensors, noised_by, own_noise, random_level, update
from genrl.diffusion.methods.sft.settings import PipelineSFT
from genrl.diffusion.policy.policy import Policy, without_guidance
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.objectives.matching import matching_error
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: PipelineSFT) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    policy, given = run.policy, GivenPictures(run, TARGET_COLUMNS, rewards=(0.0,))

    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors]:
        batch, clean = without_guidance(policy, micro_batch.batch), micro_batch.final
        levels = [random_level(policy, generator(*key, "forward", epoch, k, "level")) for key in batch.keys]
        level = torch.stack(levels).to(clean.device)
        return batch, noised_by(policy, clean, own_noise(micro_batch, epoch, k), level)

    for _ in run.iterations():
        # 1. Read.
        pictures = given.rollouts()
        # 2. Update.
        meter = Meter()
        update(run, settings, pictures, 1, prepare, loss, meter)
        del pictures
        run.finish(meter.result())


def loss(settings: PipelineSFT, policy: Policy, given: Recorded) -> Tensors:
    """The matching error of each picture, [B], and metrics."""
    output = policy.velocity(given.batch, given["noisy"], given["sigma"])
    error = matching_error(output, given["target"])
    return {"loss": error, "sft/error": error, "model_output": output}
