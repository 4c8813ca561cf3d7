"""PPO on action chunks: pi_RL (Flow-SDE, Flow-Noise; arXiv 2510.25889), DPPO (2409.00588) and ReinFlow (2505.22094).

What differs between them is the transition (`sampling`) and a few settings: a decision is one drawn denoising step of a
chunk, or the whole chain. All decisions of a chunk have the advantage of its environment step; or, with `values:
action`, every action has one, and its ratios have that (pi_RL's action level).
"""

from __future__ import annotations

from genrl.vla.methods.gae import estimated_decisions, loss
from genrl.vla.methods.ppo.settings import PPO
from genrl.vla.methods.update import Figures, learn
from genrl.vla.run import VLARun

__all__ = ["loss", "train"]


def train(run: VLARun, settings: PPO) -> None:
    """Iterations of acting, estimating and updating."""
    for iteration in run.loop.iterations():
        rollout = run.collect(settings)
        chosen, explained = estimated_decisions(run, rollout, settings)
        # values are those of the critic that acted: it must have had its warm-up
        figures, trains_policy = Figures(), iteration - run.age >= settings.critic_warmup
        learn(run, rollout, chosen, settings, figures, loss, policy=trains_policy, critic=True)
        run.finish(rollout, figures, explained)
