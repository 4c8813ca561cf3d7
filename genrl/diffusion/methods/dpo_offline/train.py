"""Diffusion-DPO from a preference data set (arXiv 2311.12908): `dpo.py` on pairs of images that are given, not drawn.

A pair is a group of two samples: the image that is preferred, with reward 1, and the other, with reward 0. Rewards of
the configuration judge the held-out prompts only.
"""

from __future__ import annotations

import torch

from genrl.config import Config
from genrl.data.preferences import Reader, as_tensor, check_set, open_set
from genrl.data.prompts import Prompt
from genrl.diffusion.methods.dpo_offline.settings import OfflineDPO
from genrl.diffusion.methods.pairs import loss, train_on
from genrl.diffusion.policy.inverse import encode
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts, batch_inputs, call_arguments, micro_batches, to_bytes
from genrl.diffusion.rollout.scoring import Scored, Scorers
from genrl.diffusion.run import DiffusionRun

__all__ = ["check", "loss", "train"]


def check(config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
    """Raise ValueError for rows without two pictures."""
    check_set(config.prompts.train, prompts)


def train(run: DiffusionRun, settings: OfflineDPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    reader, size = open_set(run.config.prompts.train, run.prompts), picture_size(run)
    train_on(run, settings, lambda: given_pairs(run, reader, size))


def picture_size(run: DiffusionRun) -> tuple[int, int]:
    """Height and width of the pipeline's pictures under the settings of sampling."""
    policy, probe = run.policy, run.probe
    with torch.no_grad():
        picture = policy.decode(probe, torch.zeros(policy.state_shape(probe), device=policy.device))
    if picture.dim() != 4:
        raise ValueError(f"trainer.algorithm: dpo_offline is for pictures; {run.config.model.path} makes videos")
    return picture.shape[-2], picture.shape[-1]


def given_pairs(run: DiffusionRun, reader: Reader, size: tuple[int, int]) -> Rollouts:
    """The pairs of this iteration, encoded; the image that is preferred at slot 2 k, the other at slot 2 k + 1."""
    config, policy, accelerator = run.config, run.policy, run.accelerator
    sampling, seed, iteration = config.sampling, config.seed, run.iteration
    run.loop.phase("sampling", sampling.images_per_iteration)
    rows = run.iteration_prompts
    plan = micro_batches(range(2 * len(rows)), sampling.batch_size, seed=seed, iteration=iteration)
    mine: dict[int, MicroBatch] = {}
    for position in range(accelerator.process_index, len(plan), accelerator.num_processes):
        slots = plan[position]
        batch = Batch(
            prompts=[rows[slot // 2].text for slot in slots],
            keys=[(seed, iteration, slot) for slot in slots],
            sampling=call_arguments(sampling),
            inputs=batch_inputs(sampling.inputs, [rows[slot // 2] for slot in slots]),
        )
        with run.loop.timed("sample"):
            pairs = {slot // 2: reader(rows[slot // 2]) for slot in slots}
            images = torch.stack([as_tensor(pairs[slot // 2][slot % 2], *size) for slot in slots])
            final = encode(policy, batch, images)
        mine[position] = MicroBatch(slots, batch, final, torch.empty(0), [], to_bytes(images))
        run.loop.alive()
    return run.take(
        Rollouts(
            mine=mine,
            num_micro_batches=len(plan),
            prompts=[row.text for row in rows for _ in range(2)],
            group=torch.arange(2 * len(rows)) // 2,
            scored=Scored({}, {}),
            total=torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(len(rows)),
            slots=plan,
        )
    )
