"""On-policy distillation of policies: act, let the teacher score what was done, update.

    distribution  L = L_clip(c_r A) + mean KL(pi(. | s) || pi_T(. | s)) over the scored steps s that the policy visited
    sampled       L = L_clip(c_r A + l_T - l), l and l_T log-probs of what was drawn under policy and teacher

A scored step is a Gaussian step of the denoising, or the draw of a token. Nothing is normalised. docs/vla.md says how
this differs from DAgger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from genrl.mdp import chains
from genrl.mdp.noise import seeded
from genrl.objectives.episodes import episode_group_advantages, executed_mask
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vla.config.schema import VLAConfig
from genrl.vla.methods.opd.settings import PolicyOPD
from genrl.vla.methods.ppo.train import learn
from genrl.vla.policies.folder import policy_class
from genrl.vla.policies.policy import Inputs
from genrl.vla.rollout.collect import ChunkRollout, episode_returns, training_rows
from genrl.vla.rollout.sampling import Acting, Replay
from genrl.vla.rollout.scores import actor_loss, at_level, decisions, filtered, score, spread_out
from genrl.vla.run import VLARun
from genrl.vla.setup import adapted, load_trained, policy_folder, sampler_of, untrained


def new_policy(config: VLAConfig) -> Any:
    """A policy with fresh weights that reads what the teacher reads, in its units. Raises ValueError where it sees
    otherwise, or its teacher does not say what it sees."""
    settings, new = config.trainer, config.policy.new
    assert isinstance(settings, PolicyOPD) and new is not None
    teacher = load_trained(settings.teacher)
    inputs = getattr(getattr(teacher, "config", None), "inputs", None)
    if not isinstance(inputs, Inputs) or (inputs.image, inputs.points) != (new.image_size, new.points):
        raise ValueError(f"policy.new: must have image_size and points of {settings.teacher}; or write policy.path")
    with seeded(config.seed, "policy"):
        return policy_class(new.type).new(inputs, teacher.action_dim, teacher.stats, new)


def opened_teacher(run: VLARun, settings: PolicyOPD) -> Any:
    """The teacher. Raises ValueError where its steps do not compare with the policy's, or another has taught before."""
    config, policy, path = run.config, run.policy, settings.teacher
    adapt = adapted(config) if policy_folder(Path(path)) == Path(path) else None  # a run's policy says itself how it is
    teacher = load_trained(path, adapt=adapt)
    teacher = teacher.with_heads(critic=0, noise_head=config.sampler.noise_head, seed=config.seed)
    teacher = teacher.to(next(policy.parameters()).device).eval().requires_grad_(False)
    probe, wrong = torch.linspace(-1, 1, 3)[:, None, None].repeat(1, policy.horizon, policy.action_dim), ""
    if not set(teacher.inputs) <= set(policy.inputs):
        wrong = f"reads {', '.join(sorted(set(teacher.inputs) - set(policy.inputs)))}, which the policy does not"
    elif (teacher.horizon, teacher.action_dim) != (policy.horizon, policy.action_dim):
        wrong = f"has chunks of {teacher.horizon} actions of {teacher.action_dim}, the policy others"
    elif sampler_of(config, teacher) != sampler_of(config, policy):
        wrong = "denoises otherwise than the policy"
    elif not torch.allclose(teacher.actions(probe), policy.actions(probe), atol=1e-5):
        wrong = "has actions in other units than the policy"
    elif run.loop.memory.setdefault("teacher", name := untrained(teacher, None)) != name:
        wrong = "is not the one that taught this run before; put it back, or begin a new run"
    if wrong:
        raise ValueError(f"trainer.teacher: {path} {wrong}")
    return teacher


@torch.no_grad()
def taught(run: VLARun, settings: PolicyOPD, teacher: Any, rollout: ChunkRollout) -> ChunkRollout:
    """The rollout with what the teacher says of its valid decisions."""
    further: dict[str, Tensor] = {}
    texts = rollout.instruction
    if not torch.equal(teacher.tokenise(texts), run.policy.tokenise(texts)):
        raise ValueError(f"trainer.teacher: {settings.teacher} numbers words otherwise than the policy")
    for part in rollout.valid.flatten().nonzero()[:, 0].split(settings.rows_per_pass):
        rows = training_rows(rollout, part)
        with run.loop.fitting():
            context = teacher.encode(rows.observation)
            replay = rollout.sampler.replay(teacher, context, rows.states, rows.next_states, rows.step_index)
        for name in ("log_prob",) if settings.estimator == "sampled" else ("means", "stds", "every"):
            if (value := getattr(replay, name)) is not None:
                if f"teacher/{name}" not in further:
                    further[f"teacher/{name}"] = value.new_zeros(rollout.valid.numel(), *value.shape[1:], device="cpu")
                further[f"teacher/{name}"][part] = value.cpu()
    shape = rollout.valid.shape
    return rollout._replace(further={name: value.view(*shape, *value.shape[1:]) for name, value in further.items()})


def train(run: VLARun, settings: PolicyOPD) -> None:
    """Iterations of acting, listening and updating."""
    teacher = opened_teacher(run, settings)
    for _ in run.loop.iterations():
        rollout = run.collect(settings)
        with run.loop.timed("train"):
            rollout = taught(run, settings, teacher, rollout)
        run.loop.check_stop()
        returns = episode_returns(rollout).masked_fill(~rollout.valid.any(0), torch.nan)
        by_reward = episode_group_advantages(returns, rollout.group) if settings.reward_coef else 0 * returns
        rows = (settings.reward_coef * by_reward).expand(rollout.valid.shape)
        trained = rollout.valid & filtered(rollout, settings)
        chosen = decisions(rollout._replace(valid=trained), rows, rows, rows.new_ones(rows.shape))
        figures = Meter()
        learn(run, rollout, chosen, settings, figures, loss, policy=True, critic=False)
        run.finish(rollout, figures.result())


def loss(settings: PolicyOPD, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's share of the update's loss, [], and sums of figures."""
    scored = score(settings, acting, given)
    executed, size, width = given["executed"], int(given["size"]), int(given["action_dim"])
    advantage, each = spread_out(given["advantage"], scored.log_prob), scored.log_prob[0].numel()
    if settings.estimator == "sampled":
        theirs = at_level(given["teacher/log_prob"][:, 0], executed, size, width, settings)
        gap = theirs.to(advantage) - scored.old_log_prob
        actor = actor_loss(settings, scored, given, advantage=advantage + gap)
        return {"loss": actor.loss, "teacher/kl": -gap.sum() / each, **actor.sums}
    actor = actor_loss(settings, scored, given, advantage=advantage)
    far = chains.executed(divergence(scored.replay, given), size, width)
    mask = executed_mask(executed, size).to(far.device)[..., None]
    total = torch.where(mask, far, 0.0).mean((1, 2)).sum()
    return {"loss": actor.loss + total / int(given["total"]), "teacher/kl": total.detach(), **actor.sums}


def divergence(now: Replay, given: Recorded) -> Tensor:
    """`KL(policy || teacher)` of what is drawn at each scored step, its mean over steps, [n, H, A]."""
    far: Tensor
    if now.every is not None:
        theirs = given["teacher/every"].to(now.every.device)
        far = kl_divergence(Categorical(logits=now.every), Categorical(logits=theirs))
    else:
        assert now.means is not None and now.stds is not None
        means, stds = (given[f"teacher/{name}"].to(now.log_prob.device) for name in ("means", "stds"))
        far = kl_divergence(Normal(now.means, now.stds), Normal(means, stds))
    return far.mean(1)
