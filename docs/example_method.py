"""Reward-weighted regression with a baseline, for flow models: a method of your own. One iteration:

1. collect   G samples x_0 of each prompt by the present model's own solver
2. score     R(x_0, c)
3. estimate  A, the advantage within the prompt's group;  w = exp(A / T) / <exp(A / T)>_G - 1
4. update    x_s = (1 - s) x_0 + s eps, s uniform;  minimise  w <(v_theta(x_s, s) - (eps - x_0))^2>
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from genrl.config.method import MetricDoc
from genrl.config.section import Positive
from genrl.diffusion.config.schema import Updating
from genrl.diffusion.forward.noising import noised, own_noise, require_flow, solved, update
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import MicroBatch
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.objectives.groups import group_advantages
from genrl.objectives.matching import matching_error
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter


class RewardWeighted(Updating):
    """Reward-weighted regression on finished samples."""

    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "rwr/weight_max": MetricDoc("largest w", "Near G - 1: one sample of a group is all, raise the temperature.")
    }
    temperature: Positive = 1.0
    """T in w = exp(A / T): the lower, the more the best samples of a group count."""


def train(run: DiffusionRun, settings: RewardWeighted) -> None:
    require_flow(run)
    size = run.config.sampling.group_size
    for _ in run.iterations():
        rollouts = run.collect(solved)
        advantages = group_advantages(rollouts.total, rollouts.group, scale="global").view(-1, size)
        weights = (size * torch.softmax(advantages / settings.temperature, 1) - 1) * (advantages != 0)  # 0: no score

        def prepare(samples: MicroBatch, epoch: int, k: int, weight=weights.flatten()):
            levels = [torch.rand((), generator=generator(*key, "level", epoch, k)) for key in samples.batch.keys]
            given = noised(samples.final, own_noise(samples, epoch, k), torch.stack(levels).to(samples.final))
            return samples.batch, given | {"weight": weight[samples.slots].to(samples.final)}

        update(run, settings, rollouts, 1, prepare, loss, meter := Meter())
        run.finish(meter.result() | {"rwr/weight_max": float(weights.max())})


def loss(settings: RewardWeighted, policy: Policy, given: Recorded) -> dict[str, torch.Tensor]:
    velocity = policy.velocity(given.batch, given["noisy"], given["sigma"])
    return {"loss": given["weight"] * matching_error(velocity, given["target"]), "model_output": velocity}
