"""The algorithm: act, estimate, update. With a critic: VL-DAC and POAD, PPO over the tokens of an agent's answers; else
GRPO and its family over groups of episodes that begin alike."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from genrl.vlm.methods.answers.train import update
from genrl.vlm.methods.episodes.rows import replay
from genrl.vlm.methods.episodes.session import Acted, Session
from genrl.vlm.methods.episodes.settings import Critic
from genrl.vlm.session import Estimated


def train(session: Session) -> None:
    """All iterations that are left."""
    for _ in session.loop.iterations():
        acted, row = session.act()
        ready, figures = session.estimate(acted)
        found = ready.found.metrics
        row |= figures | {"advantage/abs_mean": found["advantage_abs_mean"]}
        row |= {name: found[name] for name in ("zero_std_ratio", "group_std_mean") if name in found}
        row |= {"sampler/gap_mean": found["sampler_gap_mean"], "sampler/gap_max": found["sampler_gap_max"]}
        row |= learn(session, acted, ready)
        row["lr"] = session.loop.optimizer.param_groups[0]["lr"]
        session.remember(row)
        session.loop.finish(row)


def learn(session: Session, acted: Acted, ready: Estimated) -> dict[str, float]:
    """The optimiser steps of an iteration; means of what they measured.

    In the first iterations (`warmup`) only the critic is stepped. Updates end where the mean of l_old - l over an
    update's tokens, before its step, exceeds `kl_stop`. Both are `trainer.critic`'s, or the method's own.
    """
    loop, settings, rows = session.loop, session.method, acted.rows
    critic = settings.critic or Critic()
    warmup = session.preset.warmup if critic.warmup is None else critic.warmup
    kl_stop = session.preset.kl_stop if critic.kl_stop is None else critic.kl_stop
    groups = ["policy"] if session.critic is None else ["policy", "critic"]
    if session.critic is not None and loop.iteration < warmup:
        groups = ["critic"]

    def scored(some: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        turns = rows.of(some)
        # the same operations as for `old` give the same bits
        now = replay(
            session.policy,
            rows,
            turns,
            session.config.generation.temperature,
            entropy="entropy" in session.preset.reads,
        )
        extra = {} if now.entropy is None else {"policy_entropy": rows.laid(now.entropy.cpu(), some, turns)}
        if session.critic is not None:
            values = session.critic(now.states).cpu()  # a row is a turn
            extra["value"] = values if ready.batch.extra["returns"].dim() == 2 else values[:, 0]
        return rows.laid(now.log_prob.cpu(), some, turns), extra

    figures: dict[str, list[float]] = defaultdict(list)
    info = {"trainer": settings.model_dump(mode="json")}
    dtype: torch.dtype = session.policy.model.dtype
    loop.phase("training", settings.epochs * len(rows.place))
    with loop.timed("train"):
        for one in [one for _ in range(settings.epochs) for one in ready.updates]:
            found = update(loop, session.preset, ready.batch, one, scored, dtype=dtype, info=info, groups=groups)
            for name, value in found.items():
                figures[name].append(value)
            if kl_stop is not None and found["ratio/drift"] > kl_stop:
                break
    return {name: sum(values) / len(values) for name, values in figures.items()}
