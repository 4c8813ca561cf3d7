"""The algorithm: act, estimate, update. With a critic: VL-DAC and POAD, PPO over the tokens of an agent's answers; else
GRPO and its family over groups of episodes that begin alike."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vlm.common import Estimated
from genrl.vlm.engines.generation import uses_engine
from genrl.vlm.episodes.critic import laid
from genrl.vlm.episodes.run import Acted, Actor, EpisodesRun
from genrl.vlm.methods.episodes.settings import Critic, Episodes
from genrl.vlm.methods.policy_loss import recipe_loss, sampler_figures
from genrl.vlm.methods.updates import Asked, Update, token_tensors, update
from genrl.vlm.policies.folder import idle_pass
from genrl.vlm.policies.policy import dtype_of


def train(run: EpisodesRun, settings: Episodes) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        acted, row = run.act()
        ready, figures = run.estimate(acted)
        metrics = ready.estimate.metrics
        row |= figures | {"advantage/abs_mean": metrics["advantage_abs_mean"]}
        row |= {name: metrics[name] for name in ("zero_std_ratio", "group_std_mean") if name in metrics}
        row |= sampler_figures(metrics, differs=run.age > 0 or uses_engine(run.policy))
        row |= learn(run, acted, ready)
        run.remember(row)
        run.finish(row)


def learn(run: EpisodesRun, acted: Acted, ready: Estimated) -> dict[str, float]:
    """The optimiser steps of an iteration; means of what they measured.

    In the first iterations (`warmup`) only the critic is stepped. Updates end where the mean of l_old - l over an
    update's tokens, before its step, exceeds `kl_stop`. Both are `trainer.critic`'s, or the method's own.
    """
    loop, settings, rows = run.loop, run.settings, acted.rows
    critic = settings.critic or Critic()
    warmup = run.preset.warmup if critic.warmup is None else critic.warmup
    kl_stop = run.preset.kl_stop if critic.kl_stop is None else critic.kl_stop
    groups = ["policy"] if run.critic is None else ["policy", "critic"]
    if run.critic is not None and loop.iteration < warmup:
        # Advantages by an untrained critic would teach the policy noise.
        groups = ["critic"]

    def recorded(one: Update, some: Tensor) -> Recorded:
        turns = rows.of(some)
        prompts = [rows.prompts[turn] for turn in turns.tolist()]
        asked = Asked(prompts, torch.arange(len(turns)), run.config.generation.temperature, run.preset)
        tensors = token_tensors(one.part(ready.batch, some)) | {"places": rows.places(some, turns)}
        return Recorded(asked, tensors | {"answers": rows.tokens[turns], "answered": rows.mask[turns]})

    meter, dtype, idle = Meter(), dtype_of(run.config), partial(idle_pass, run.policy)
    loop.phase("training", settings.epochs * len(rows.place))
    with loop.timed("train"):
        for one in [one for _ in range(settings.epochs) for one in ready.updates]:
            figures = update(loop, settings, run.actor, one, recorded, loss, dtype=dtype, groups=groups, idle=idle)
            meter.note(figures)
            if kl_stop is not None and figures["ratio/drift"] > kl_stop:
                break
    return meter.result()


def loss(settings: Episodes, actor: Actor, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the update's loss, [], its log-probabilities [b, L], and what `policy_loss` measures.

    Every turn has a prompt of its own.
    """
    batch: Asked = given.batch
    assert batch.preset is not None, "a method of this folder has one"
    places = given["places"].cpu()
    now = actor.policy.log_probs(  # the same operations as for `old` give the same bits
        batch.prompts,
        given["answers"],
        given["answered"],
        group=batch.group,
        temperature=batch.temperature,
        entropy="entropy" in batch.preset.reads,
        share_prefix=False,
    )
    extra = {} if now.entropy is None else {"policy_entropy": laid(now.entropy.cpu(), places)}
    if actor.critic is not None:
        values = actor.critic(now.states).cpu()  # a row is a turn
        extra["value"] = values if given["extra/returns"].dim() == 2 else values[:, 0]
    return recipe_loss(batch.preset, laid(now.log_prob.cpu(), places), extra, given)
