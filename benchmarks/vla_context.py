"""What it saves to encode an observation once, instead of for every denoising step, in sampling and in replay.

    python -m benchmarks.vla_context [--rounds 5]

Both ways draw the same chunks by Flow-SDE with all steps noisy, score them again and go backwards through the score;
their log-probabilities are compared first, to 1e-5. CPU seconds of the process, the median of several rounds taken in
turns. Writes vla_context.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import parser, save
from genrl.mdp.noise import generator
from genrl.vla.policies.embedded import TinyFlowConfig, TinyFlowVLA
from genrl.vla.policies.encoder import Inputs
from genrl.vla.policies.policy import ACTION, IMAGE, STATE, TOKENS, Batch, PredictsVelocity
from genrl.vla.rollout.sampling import ChunkNoise, FlowSteps

SETTINGS = ((32, 4), (64, 4), (64, 8))
BATCH = 64


class Anew:
    """The policy as it would be with an observation for its context: encoded at every step."""

    def __init__(self, policy: TinyFlowVLA) -> None:
        self.policy, self.horizon, self.action_dim = policy, policy.horizon, policy.action_dim

    def encode(self, observation: Batch) -> Batch:
        return observation

    def velocity(self, context: Batch, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.policy.velocity(self.policy.encode(context), x, sigma)


def policy_of(size: int) -> TinyFlowVLA:
    torch.manual_seed(0)
    stats = {
        name: {"mean": torch.zeros(3), "std": torch.ones(3), "min": -torch.ones(3), "max": torch.ones(3)}
        for name in (STATE, ACTION)
    }
    inputs = Inputs(state=3, vocabulary=("put", "the", "red", "block"), image=size)
    policy = TinyFlowVLA(TinyFlowConfig(inputs, action_dim=3, horizon=4), stats)
    torch.nn.init.normal_(policy.out.weight, std=0.02)
    return policy


def once(policy: Any, sampler: FlowSteps, observation: Batch, noise: ChunkNoise) -> tuple[torch.Tensor, float]:
    """Log-probabilities of the replay, and CPU seconds of sampling, replay and backward pass."""
    began = time.process_time()
    with torch.no_grad():
        record = sampler.sample(policy, policy.encode(observation), noise)
    again = sampler.replay(policy, policy.encode(observation), record.states, record.next_states, record.step_index)
    again.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    return again.log_prob.detach(), time.process_time() - began


def measure(size: int, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways, the median and each, and by how much their log-probabilities differ."""
    policy, sampler = policy_of(size), FlowSteps(steps=steps, selection="all")
    rng = torch.Generator().manual_seed(0)
    observation: Batch = {
        STATE: torch.randn(BATCH, 3, generator=rng),
        IMAGE: torch.randint(256, (BATCH, size, size, 3), generator=rng, dtype=torch.uint8),
        TOKENS: torch.randint(1, 5, (BATCH, 6), generator=rng),
    }
    noise = sampler.noise(policy, [generator(0, i) for i in range(BATCH)])
    ways: dict[str, Callable[[], tuple[torch.Tensor, float]]] = {
        "once": lambda: once(policy, sampler, observation, noise),
        "anew": lambda: once(Anew(policy), sampler, observation, noise),
    }
    assert isinstance(Anew(policy), PredictsVelocity)
    error = float((ways["once"]()[0] - ways["anew"]()[0]).abs().max())
    assert error < 1e-5, f"log-probabilities differ by {error:.1g}"
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(way()[1])
    median = {name: statistics.median(times) for name, times in taken.items()}
    return {"picture": size, "steps": steps, "cpu_s": median, "rounds": taken, "log_prob_error": error}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    results = []
    print("| picture | steps K | times encoded | once | for every step | ratio | log-probabilities differ by |")
    print("| --- " * 7 + "|")
    for size, steps in SETTINGS:
        row = measure(size, steps, given.rounds)
        results.append(row)
        short, long = row["cpu_s"]["once"], row["cpu_s"]["anew"]
        print(
            f"| {size} px | {steps} | 2 against {2 * steps} | {short:.3f} s | {long:.3f} s | {long / short:.1f} "
            f"| {row['log_prob_error']:.1g} |"
        )
    save(given.out, "vla_context", results)


if __name__ == "__main__":
    main()
