"""What the trainers on the forward process share: finished samples, noised to drawn levels, and the optimiser steps of
methods that train each sample at several noise levels, or steps of its own.

Time: sigma = 1 noise, sigma = 0 data, velocity = noise - data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from genrl.data.preferences import as_tensor, check_set, open_set
from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config, Updating
from genrl.diffusion.forward.settings import Matching
from genrl.diffusion.policy.decoding import Encoder
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.forest import Samples, independent
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts, batch_inputs, call_arguments, micro_batches, to_bytes
from genrl.diffusion.rollout.scoring import Scored
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.levels import diffusion_sample, diffusion_target, flow_sample, flow_target, logit_normal_level
from genrl.mdp.noise import keyed_noise
from genrl.objectives.groups import group_advantages, group_statistics
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter, Results, descend
from genrl.runtime.weights.low_rank import merged

Tensors = dict[str, Tensor]

REFERENCE = "reference"


def require_flow(run: DiffusionRun) -> None:
    """Raise ValueError where the model predicts something else than a velocity."""
    if run.policy.head.parametrisation != "flow":
        raise ValueError(
            f"trainer.algorithm: {run.config.trainer.algorithm} needs a flow-matching model; "
            f"{run.config.model.path} predicts {run.policy.head.prediction_type}. Use flow_grpo with kernel: ddim"
        )


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensors:
    """The state at `sigma` on the straight path from `clean` to `noise`, and the velocity there. sigma [] or [B]."""
    return {
        "sigma": sigma,
        "noisy": flow_sample(clean, noise, sigma),
        "target": flow_target(clean, noise),
    }


def random_level(policy: Policy, rng: torch.Generator) -> Tensor:
    """A noise level of training: logit-normal for a flow; a timestep, uniform, for others."""
    if policy.head.parametrisation == "flow":
        # How SD3 was trained (arXiv 2403.03206), and most flows since: levels in the middle, where a prediction is
        # hardest.
        return logit_normal_level(rng)
    return torch.randint(len(policy.head.alphas_cumprod), (), generator=rng)


def noised_by(policy: Policy, clean: Tensor, noise: Tensor, level: Tensor) -> Tensors:
    """The states at these levels [B] (timesteps, where the model is no flow), and the network's target there."""
    if policy.head.parametrisation == "flow":
        return noised(clean, noise, level)
    alpha_bar = policy.head.alphas_cumprod.to(clean.device)[level]
    target = diffusion_target(clean, noise, alpha_bar, policy.head.prediction_type)
    return {"sigma": level, "noisy": diffusion_sample(clean, noise, alpha_bar), "target": target}


def own_noise(micro_batch: MicroBatch, *names: int | str) -> Tensor:
    """Noise of each sample, by its key and `names`, [B, ...]."""
    clean = micro_batch.final
    return torch.stack([keyed_noise(clean.shape[1:], *key, "forward", *names) for key in micro_batch.batch.keys]).to(
        clean
    )


def group_noise(micro_batch: MicroBatch, group: Tensor, *names: int | str) -> Tensor:
    """Noise of each sample, the same for all of a group (int64 [B]), [B, ...]."""
    # By the group's number, not the sample's: samples that are compared meet the same noise, which then cancels.
    clean, (seed, iteration, *_) = micro_batch.final, micro_batch.batch.keys[0]
    noises = {
        g: keyed_noise(clean.shape[1:], seed, iteration, "group", g, "forward", *names) for g in set(group.tolist())
    }
    return torch.stack([noises[g] for g in group.tolist()]).to(clean)


def solved(policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None]) -> Samples:
    """Samples by the deterministic solver."""
    with merged(policy.denoisers.values()):
        return independent(policy.roll_out(batch), slots)


def estimate(settings: Matching, rollouts: Rollouts) -> tuple[Tensor, Meter]:
    """The advantages of the samples, float64 [N], cut at `advantage_clip`, and metrics of them."""
    clip, meter = settings.advantage_clip, Meter()
    advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale, clip=clip)
    meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    meter.add_advantages(advantages, clip)
    return advantages, meter


@torch.no_grad()
def under(run: DiffusionRun, snapshot: str, batch: Batch, state: Tensor, sigma: Tensor) -> Tensor:
    """The model's output under a snapshot ("reference": the model before training), [B, ...], without gradient."""
    weights, policy = run.weights, run.policy
    # Merged within, not before: it is the snapshot's adapter that is merged.
    with weights.reference() if snapshot == REFERENCE else weights.use(snapshot), merged(policy.denoisers.values()):
        return policy.velocity(batch, state, sigma)


def check_given(config: Config, rows: Sequence[Prompt], columns: Sequence[str]) -> None:
    """Raise PromptError for rows without these images, or with one that does not fit the picture to be edited."""
    sampling = config.sampling
    size = (sampling.height, sampling.width)
    check_set(config.prompts.train, rows, columns, beside=sampling.inputs.get("image"), size=size)


def picture_size(run: DiffusionRun) -> tuple[int, int]:
    """Height and width of the pipeline's pictures under the settings of sampling."""
    policy, probe = run.policy, run.probe
    with torch.no_grad():
        picture = policy.decode(probe, torch.zeros(policy.state_shape(probe), device=policy.device))
    if picture.dim() != 4:
        method, model = run.config.trainer.algorithm, run.config.model.path
        raise ValueError(f"trainer.algorithm: {method} is for pictures; {model} makes videos")
    return picture.shape[-2], picture.shape[-1]


class GivenPictures:
    """The pictures that a run trains on: of an iteration's row k those at slots G k .. G (k + 1) - 1, with
    G = len(rewards)."""

    def __init__(self, run: DiffusionRun, columns: Sequence[str], rewards: tuple[float, ...]) -> None:
        """columns: that hold them; rewards: of each picture of a row."""
        self.run, self.rewards, self.size = run, rewards, picture_size(run)
        self.reader = open_set(run.config.prompts.train, run.prompts, columns)
        self.encoded = Encoder(run.policy)

    def rollouts(self) -> Rollouts:
        """Those of this iteration, cut to the size that is sampled, and encoded."""
        run, rewards = self.run, self.rewards
        config, accelerator = run.config, run.accelerator
        sampling, seed, iteration = config.sampling, config.seed, run.iteration
        run.loop.phase("sampling", sampling.images_per_iteration)
        rows, each = run.iteration_prompts, len(rewards)
        plan, bounds = micro_batches(config, range(each * len(rows)), iteration, accelerator.num_processes)
        mine: dict[int, MicroBatch] = {}
        for position in range(accelerator.process_index, len(plan), accelerator.num_processes):
            slots = plan[position]
            batch = Batch(
                prompts=[rows[slot // each].text for slot in slots],
                keys=[(seed, iteration, slot) for slot in slots],
                sampling=call_arguments(sampling),
                inputs=batch_inputs(sampling.inputs, [rows[slot // each] for slot in slots]),
            )
            with run.loop.timed("sample"):
                pictures = {k: self.reader(rows[k]) for k in dict.fromkeys(slot // each for slot in slots)}
                images = torch.stack([as_tensor(pictures[slot // each][slot % each], *self.size) for slot in slots])
                final = self.encoded(batch, images)
            mine[position] = MicroBatch(slots, batch, final, torch.empty(0), [], to_bytes(images))
            run.loop.alive()
        return run.take(
            Rollouts(
                mine=mine,
                slots=plan,
                bounds=bounds,
                prompts=[row.text for row in rows for _ in rewards],
                group=torch.arange(each * len(rows)) // each,
                scored=Scored({}, {}),
                total=torch.tensor(rewards, dtype=torch.float64).repeat(len(rows)),
            )
        )


def update(
    run: DiffusionRun,
    settings: Updating,
    rollouts: Rollouts,
    num_draws: int,
    prepare: Callable[[MicroBatch, int, int], tuple[Batch, Tensors] | None],
    loss: Loss,
    meter: Meter,
    count: Callable[[list[int]], int] | None = None,
) -> None:
    """The optimiser steps of one iteration: every micro-batch at `num_draws` noise levels or steps, per inner epoch.

    prepare(micro-batch, epoch, draw) gives the conditions and all that the loss is made of; None = nothing to train.
    `counts` among it is the weight of every metric, along its last dimension or [] for all: 0 = evaluated with the
    other processes, but in no metric. loss: the method's.
    count(slots): losses that the samples of an update have, over all draws and processes; None: each at every draw.
    """

    def recorded_of(part: tuple[MicroBatch, int, int]) -> Recorded | None:
        prepared = prepare(*part)
        return None if prepared is None else Recorded(*prepared)

    def measure(part: object, results: Results, recorded: Recorded) -> None:
        meter.add_all(results, recorded["counts"] if "counts" in recorded else None)

    run.start_training(settings.epochs * num_draws * len(rollouts.mine))
    for epoch in range(settings.epochs):
        for of_update, slots in rollouts.updates():
            divisor = len(slots) * num_draws if count is None else count(slots)
            parts = product(of_update, [epoch], range(num_draws if divisor else 0))
            norms = descend(run.loop, settings, run.policy, parts, recorded_of, loss, divisor=divisor, measure=measure)
            meter.note({"grad_norm": norms["policy"]})
