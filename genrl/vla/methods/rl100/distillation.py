"""RL-100's last stage: a policy that acts in one call, from one whose chain has many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genrl.mdp.noise import generator, seeded
from genrl.vla.evaluate import evaluate
from genrl.vla.methods.rl100.settings import RL100
from genrl.vla.offline.imitation import mean_of_last, step_beside
from genrl.vla.policies.embedded import TinyFlowConfig, TinyFlowVLA
from genrl.vla.policies.folder import save_policy
from genrl.vla.policies.policy import STATE, Batch, Policy, rows
from genrl.vla.rollout.sampling import Acting, LearnedNoise, Sampler
from genrl.vla.setup import open_tables, sampler_of, side_by_side

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

LEARNING_RATE = 1e-3
"""Learning rate of the one-step copy."""


def one_step(student: TinyFlowVLA, context: Batch, noise: Tensor) -> Tensor:
    """The student's chunk from noise [B, H, A] in one call: `x - v(x, 1)`, a flow policy's single Euler step."""
    return noise - student.velocity(context, noise, torch.ones(len(noise), device=noise.device))


def distil(
    student: TinyFlowVLA,
    teacher: Policy,
    sampler: Sampler,
    observations: Batch,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> Iterator[float]:
    """Consistency distillation: the student's one step meets the end of the teacher's chain from the same noise.

    Mean square of the difference on observations of the data, yielded for every step; the teacher does not explore.
    """
    optimiser = torch.optim.AdamW(student.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, total_iters=steps)
    for step in range(steps):
        rng = generator(seed, "distillation", step)
        index = torch.randint(len(observations[STATE]), (batch_size,), generator=rng)
        batch = rows(observations, index)
        noise = torch.randn((batch_size, teacher.horizon, teacher.action_dim), generator=rng)
        with torch.no_grad():
            goal = sampler.act(teacher, teacher.encode(batch), noise)
        loss = (one_step(student, student.encode(batch), noise) - goal).square().mean()
        loss_value = step_beside(optimiser, loss)
        schedule.step()
        yield loss_value


def distilled(run: VLARun, settings: RL100, observations: Batch) -> dict[str, float]:
    """Make the one-step copy, judge it in the environment, and save it as `one_step` in the run folder."""
    config, loop, policy = run.config, run.loop, run.policy
    with seeded(config.seed, "student"):
        inputs = policy.config.inputs
        student = TinyFlowVLA(TinyFlowConfig(inputs, policy.action_dim, policy.horizon), policy.stats)
    if inputs.looks:  # the data hold what the policy's encoder has seen
        student.encoder.load_state_dict(policy.encoder.state_dict())
        student.encoder.requires_grad_(False)
    student = student.to(loop.process.accelerator.device)
    loop.phase("distilling")
    sampler = sampler_of(config, policy)
    how = {"steps": settings.distil_steps, "batch_size": settings.batch_size, "seed": config.seed}
    error = mean_of_last(distil(student, policy, sampler, observations, learning_rate=LEARNING_RATE, **how))
    save_policy(student, loop.process.run.folder / "one_step")
    judge = config.evaluation
    env = open_tables(config, policy, num_envs=side_by_side(config, judge.episodes))
    # one Euler step of a flow policy: nothing of the sampler's noise is used without exploration
    judged = evaluate(Acting(student, LearnedNoise(steps=1)), env, episodes=judge.episodes, seed=judge.seed)
    env.close()
    return {"distil/error": error, "distil/success_mean": sum(judged.success) / len(judged.success)}
