"""Diffusion-DPO from a preference data set (arXiv 2311.12908): `dpo.py` on pairs of images that are given, not drawn.

A pair is a group of two samples: the image that is preferred, with reward 1, and the other, with reward 0. Rewards of
the configuration judge the held-out prompts only.
"""

from __future__ import annotations

import torch

from genrl.data.preferences import Reader, as_tensor, open_set
from genrl.diffusion.methods.dpo.train import train_on
from genrl.diffusion.methods.dpo_offline.settings import OfflineDPO
from genrl.diffusion.policy.inverse import encode
from genrl.diffusion.policy.policy import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts, batch_inputs, call_arguments, micro_batches, to_bytes
from genrl.diffusion.rollout.scoring import Scored
from genrl.diffusion.session import Session


def train(session: Session, settings: OfflineDPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    reader, size = open_set(session.config.prompts.train, session.prompts), picture_size(session)
    train_on(session, settings, lambda: given_pairs(session, reader, size))


def picture_size(session: Session) -> tuple[int, int]:
    """Height and width of the pipeline's pictures under the settings of sampling."""
    policy, probe = session.policy, session.probe
    with torch.no_grad():
        picture = policy.decode(probe, torch.zeros(policy.state_shape(probe), device=policy.device))
    if picture.dim() != 4:
        raise ValueError(f"trainer.algorithm: dpo_offline is for pictures; {session.config.model.path} makes videos")
    return picture.shape[-2], picture.shape[-1]


def given_pairs(session: Session, reader: Reader, size: tuple[int, int]) -> Rollouts:
    """The pairs of this iteration, encoded; the image that is preferred at slot 2 k, the other at slot 2 k + 1."""
    config, policy, accelerator = session.config, session.policy, session.accelerator
    sampling, seed, iteration = config.sampling, config.seed, session.iteration
    session.phase("sampling", sampling.images_per_iteration)
    rows = session.iteration_prompts
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
        with session.timed("sample"):
            pairs = {slot // 2: reader(rows[slot // 2]) for slot in slots}
            images = torch.stack([as_tensor(pairs[slot // 2][slot % 2], *size) for slot in slots])
            final = encode(policy, batch, images)
        mine[position] = MicroBatch(slots, batch, final, torch.empty(0), [], to_bytes(images))
        session.beat()
    return session.take(
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
