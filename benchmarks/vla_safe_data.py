"""Data in DSRL's format: what PPO does on its way to policies that mind costs more and less.

    python -m benchmarks.vla_safe_data SafetyBallCircle-v0 runs/safe --penalties 0 1 4 10

For each penalty a small Gaussian policy is trained by PPO on reward - penalty x cost, from nothing. A sample of all the
episodes on the way there, poor and good, dear and cheap, is written to one file with the keys of DSRL's (arXiv
2306.09303), named as theirs: ENVIRONMENT-LARGEST COST-EPISODES.hdf5. Two cores do four penalties in some minutes. Needs
`pip install h5py pybullet`, and `pip install --no-deps bullet-safety-gym`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from genrl.mdp.noise import derive_seed, generator
from genrl.objectives.episodes import gae, normalise_advantages
from genrl.objectives.policy_losses import clipped_surrogate
from genrl.vla.offline.transitions import Transitions, merge, play, take
from genrl.vla.policies.policy import STATE, Batch
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.tables import open_environment

GAMMA, LAM, CLIP = 0.99, 0.95, 0.2
EPOCHS, MINIBATCH, LR = 8, 500, 1e-3
REWARD_SCALE = 0.1


class Reads:
    """A reader of nothing but numbers."""

    inputs = (STATE,)

    def tokenise(self, instructions: object) -> Tensor:
        raise NotImplementedError


class Gaussian(nn.Module):
    """Numbers [B, D] -> a Normal of actions [B, A] with one learned spread, and their value [B]."""

    def __init__(self, numbers: int, actions: int) -> None:
        super().__init__()
        self.mean, self.value = _mlp(numbers, actions), _mlp(numbers, 1)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, state: Tensor) -> Normal:
        return Normal(self.mean(state).tanh(), self.log_std.exp())


def _mlp(numbers: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(numbers, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )  # fmt: skip


def collect(env: Environment, policy: Gaussian, steps: int, seed: int) -> Transitions:
    """An episode of every environment."""

    @torch.no_grad()
    def behave(observation: Batch, decision: int) -> Tensor:
        density = policy(observation[STATE])
        noise = torch.randn(density.loc.shape, generator=generator(seed, "actions", decision))
        return (density.loc + density.scale * noise)[:, None]

    return play(env, behave, Reads(), decisions=steps, seed=seed, gamma=GAMMA, one_episode=True)


def improve(policy: Gaussian, optimiser: torch.optim.Optimizer, data: Transitions, penalty: float, seed: int) -> None:
    """PPO on an iteration's episodes."""
    order = torch.argsort(data.episode, stable=True)  # every episode's steps one after the other
    data = take(data, order)
    state, action = data.observation[STATE], data.action[:, 0]
    with torch.no_grad():
        old = policy(state).log_prob(action).sum(1)
        value, following = policy.value(state)[:, 0], policy.value(data.next_observation[STATE])[:, 0]
    paid = REWARD_SCALE * (data.reward - penalty * data.cost)
    truncated = data.done & ~data.terminated
    # one column: a trace ends with its episode
    columns = [each[:, None] for each in (paid, data.terminated, truncated, value, following)]
    credit = gae(*columns, discount=GAMMA, lam=LAM)
    advantage, returns = normalise_advantages(credit.advantages[:, 0], eps=1e-5).float(), credit.returns[:, 0].float()
    for epoch in range(EPOCHS):
        for index in torch.randperm(len(state), generator=generator(seed, "epoch", epoch)).split(MINIBATCH):
            density = policy(state[index])
            surrogate = clipped_surrogate(
                density.log_prob(action[index]).sum(1), old[index], advantage[index], clip_low=CLIP, clip_high=CLIP
            )
            error = policy.value(state[index])[:, 0] - returns[index]
            loss = surrogate.loss.mean() + 0.5 * error.square().mean() - 0.003 * density.entropy().sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimiser.step()


def totals(data: Transitions) -> tuple[Tensor, Tensor]:
    """Return and cost of every episode."""
    zero = torch.zeros(int(data.episode.max()) + 1)
    return zero.index_add(0, data.episode, data.reward), zero.index_add(0, data.episode, data.cost)


def save(data: Transitions, chosen: Tensor, folder: Path, name: str) -> Path:
    """The chosen episodes in DSRL's format."""
    data = take(data, torch.isin(data.episode, chosen))
    data = take(data, torch.argsort(data.episode, stable=True))
    columns = {
        "observations": data.observation[STATE],
        "next_observations": data.next_observation[STATE],
        "actions": data.action[:, 0].clamp(-1.0, 1.0),
        "rewards": data.reward,
        "costs": data.cost,
        "terminals": data.terminated,
        "timeouts": data.done & ~data.terminated,
    }
    largest = totals(data)[1].max()
    path = folder / f"{name}-{largest:.0f}-{len(chosen)}.hdf5"
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, values in columns.items():
            numbers = values.numpy()
            file.create_dataset(key, data=numbers.astype(np.float32), compression="gzip")
    return path


def main() -> None:
    """Train with every penalty, sample of all episodes, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="SafetyBallCircle-v0, ...")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--penalties", type=float, nargs="+", default=[0.0, 1.0, 4.0, 10.0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--num-envs", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    env = open_environment(
        Simulation(
            given.name, num_envs=given.num_envs, chunk=1, reward="environment", success_key=None, cost_key="cost"
        )
    )
    assert env.max_steps is not None
    env.reset(seed=0)
    parts = []
    for penalty in given.penalties:
        own = derive_seed(given.seed, "penalty", str(penalty))
        torch.manual_seed(own % 2**32)
        policy = Gaussian(env.reset(seed=0)[0]["agent_pos"].shape[1], env.action_dim)
        optimiser = torch.optim.Adam(policy.parameters(), lr=LR)
        for iteration in range(given.iterations):
            seed = derive_seed(own, iteration) % 2**32
            parts.append(collect(env, policy, env.max_steps, seed))
            improve(policy, optimiser, parts[-1], penalty, seed)
            paid, cost = totals(parts[-1])
            spread = float(policy.log_std.exp().mean())
            print(f"penalty {penalty:g} {iteration}: return {paid.mean():.1f} cost {cost.mean():.1f} std {spread:.2f}")
    env.close()
    data = merge(*parts)
    count = int(data.episode.max()) + 1
    chosen = torch.randperm(count, generator=generator(given.seed, "chosen"))[: given.episodes]
    print(save(data, chosen, given.folder, given.name))


if __name__ == "__main__":
    main()
