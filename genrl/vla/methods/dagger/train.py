"""DAgger: data set aggregation (arXiv 1011.0686, algorithm 3.1), on chunks of actions.

Round i = 1, 2, ...: the policy acts, and with probability beta^i the expert in its place; the expert says at every
decision what it would do from there; all that it has said so far is joined with the demonstrations, which are the round
in which it acted alone, and the policy imitates the union by its own loss. The expert is the simulator's (`simulator.
Expert`). An expert who takes over where he wants, and labels only there (HG-DAgger, 1810.02890), is a person: see
docs/vla_robot.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp.noise import derive_seed, generator
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.weights.sharding import unsharded
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.methods.dagger.settings import DAgger
from genrl.vla.offline.imitation import imitation_loss, imitation_updates
from genrl.vla.offline.transitions import Store
from genrl.vla.policies.policy import ACTION, Batch, joined_batches, rows
from genrl.vla.rollout.collect import observe
from genrl.vla.rollout.sampling import Acting
from genrl.vla.simulators.tables import Simulators

if TYPE_CHECKING:
    from genrl.vla.run import VLARun


class Visit(NamedTuple):
    """N decisions of a round as frames, with the expert's chunks [N, H, A] as `ACTION`; slot, decision int64 [N]: where
    they belong; error [N]: how far the policy's own chunks were from the expert's. Of the episodes: success, steps;
    dropped: how many were lost."""

    frames: Batch
    slot: Tensor
    decision: Tensor
    error: Tensor
    success: list[bool]
    steps: int
    dropped: int


def loss(settings: DAgger, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """The part [] that these frames have in the mean loss of a batch."""
    return {"loss": imitation_loss(acting.policy, given)}


@torch.no_grad()
def visit(run: VLARun, beta: float, iteration: int) -> Visit:
    """An episode in every slot, labelled at each decision: a function of (seed, iteration, slot) and the weights."""
    env, policy, acting = cast(Simulators, run.env), run.policy, run.acting
    seed = derive_seed(run.config.seed, "dagger", iteration)
    rngs = [generator(seed, slot) for slot in range(run.first_slot, run.first_slot + env.num_envs)]
    env.first_slot, dropped = run.first_slot, env.dropped
    raw, _ = env.reset(seed=seed, options={"once": True})
    running, (success, lost) = np.ones(env.num_envs, dtype=np.bool_), np.zeros((2, env.num_envs), dtype=np.bool_)
    parts, slots, errors, steps, decision = [], [], [], 0, 0
    while running.any():
        observation = observe(raw, env, policy, decision)
        # Drawn before it is known who acts, so that the numbers that follow are the same for any beta.
        noise = torch.stack([torch.randn(policy.horizon, policy.action_dim, generator=rng) for rng in rngs])
        student_chunk = acting.sampler.act(policy, policy.encode(observation), noise)
        expert_chunk = torch.from_numpy(env.expert_chunks(policy.horizon))
        expert_acts = torch.tensor([float(torch.rand((), generator=rng)) < beta for rng in rngs])
        chunk = torch.where(expert_acts[:, None, None], expert_chunk, policy.actions(student_chunk).cpu().float())
        raw, _, terminated, truncated, info = env.step(chunk[:, : env.chunk].numpy())
        labelled = torch.from_numpy(running & (info["n_executed"] > 0))  # 0: it was lost, and so may be what was told
        parts.append(rows(observation | {ACTION: expert_chunk}, labelled))
        slots.append(run.first_slot + labelled.nonzero()[:, 0])
        width = expert_chunk.shape[-1]
        errors.append(
            (policy.normalised(expert_chunk)[..., :width] - student_chunk.cpu()[..., :width])
            .abs()
            .mean((1, 2))[labelled]
        )
        success |= running & info["is_success"]
        lost |= running & info["dropped"]
        steps += int(info["n_executed"][running].sum())
        running &= ~(terminated | truncated)
        decision += 1
        run.loop.advance_or_leave(0)
    decisions = torch.repeat_interleave(torch.arange(decision), torch.tensor([len(part) for part in slots]))
    joined = joined_batches(parts, torch.cat), torch.cat(slots), decisions, torch.cat(errors)
    return Visit(*joined, success[~lost].tolist(), steps, env.dropped - dropped)


def in_order(parts: list[Visit]) -> Batch:
    """The frames of all processes by decision and slot: the same, however many there are."""
    slot, decision = torch.cat([part.slot for part in parts]), torch.cat([part.decision for part in parts])
    order = slot.argsort()
    order = order[decision[order].argsort(stable=True)]
    return rows(joined_batches([part.frames for part in parts], torch.cat), order)


def train(run: VLARun, settings: DAgger) -> None:
    """Rounds of acting, labelling, and imitation of all labels and the demonstrations."""
    loop, env = run.loop, cast(Simulators, run.env)
    env.reset(seed=0)
    env.expert_chunks(1)  # said now where nobody answers, and not after the first evaluation
    store = Store()
    loop.keep("dagger", store)
    for iteration in loop.iterations():
        beta = settings.beta ** (iteration + 1)
        loop.phase("acting")
        with loop.timed("rollout"), unsharded(run.policy):
            parts = gather_object([visit(run, beta, iteration)])
        labels = [store.data["labels"]] if store.ready else []
        store.data = {"labels": joined_batches([*labels, in_order(parts)], torch.cat)}
        store.ready = True
        known: Batch = store.data["labels"]
        error = torch.cat([part.error for part in parts])
        success = [flag for part in parts for flag in part.success]
        loop.memory["env_steps"] = loop.memory.get("env_steps", 0) + sum(part.steps for part in parts)
        figures = {
            "rollout/success": sum(success) / max(1, len(success)),
            "rollout/env_steps": float(loop.memory["env_steps"]),
            "rollout/dropped": float(sum(part.dropped for part in parts)),
            "dagger/labels": float(len(known[ACTION])),
            "dagger/beta": beta,
            "dagger/error": float(error.mean()),
        }
        if ACTION_IS_PAD in run.frames:  # of demonstrations that end; an expert says what comes after the end
            known = known | {ACTION_IS_PAD: torch.zeros(known[ACTION].shape[:2], dtype=torch.bool)}
        union = joined_batches([run.frames, known], torch.cat)
        loop.finish(figures | imitation_updates(run, settings, union, loss) | {"lr": loop.lr})
