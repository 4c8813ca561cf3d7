"""The algorithm: act, estimate, update. With a critic: VL-DAC and POAD, PPO over the tokens of an agent's answers; else
GRPO and its family over groups of episodes that begin alike."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from genrl.vlm.episodes.rows import replay
from genrl.vlm.episodes.run import Acted, EpisodesRun
from genrl.vlm.methods.answers.train import update
from genrl.vlm.methods.episodes.settings import Critic, Episodes
from genrl.vlm.run import Estimated


def train(run: EpisodesRun, settings: Episodes) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        acted, row = run.act()
        ready, figures = run.estimate(acted)
        found = ready.found.metrics
        row |= figures | {"advantage/abs_mean": found["advantage_abs_mean"]}
        row |= {name: found[name] for name in ("zero_std_ratio", "group_std_mean") if name in found}
        row |= {"sampler/gap_mean": found["sampler_gap_mean"], "sampler/gap_max": found["sampler_gap_max"]}
        row |= learn(run, acted, ready)
        row["lr"] = run.loop.lr
        run.remember(row)
        run.loop.finish(row)


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
        groups = ["critic"]

    def scored(some: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        turns = rows.of(some)
        # the same operations as for `old` give the same bits
        now = replay(
            run.policy,
            rows,
            turns,
            run.config.generation.temperature,
            entropy="entropy" in run.preset.reads,
        )
        extra = {} if now.entropy is None else {"policy_entropy": rows.laid(now.entropy.cpu(), some, turns)}
        if run.critic is not None:
            values = run.critic(now.states).cpu()  # a row is a turn
            extra["value"] = values if ready.batch.extra["returns"].dim() == 2 else values[:, 0]
        return rows.laid(now.log_prob.cpu(), some, turns), extra

    figures: dict[str, list[float]] = defaultdict(list)
    dtype: torch.dtype = run.policy.model.dtype
    loop.phase("training", settings.epochs * len(rows.place))
    with loop.timed("train"):
        for one in [one for _ in range(settings.epochs) for one in ready.updates]:
            found = update(loop, run.preset, ready.batch, one, scored, dtype=dtype, settings=settings, groups=groups)
            for name, value in found.items():
                figures[name].append(value)
            if kl_stop is not None and found["ratio/drift"] > kl_stop:
                break
    return {name: sum(values) / len(values) for name, values in figures.items()}
