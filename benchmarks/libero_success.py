"""A policy's success on LIBERO by LeRobot's own evaluation loop, and by ours: from which listed starts do they differ?

    PYTHONPATH=.:rewards lerobot/bin/python -m benchmarks.libero_success RUN RUN

RUN: folders of runs of one task, of policies from states. The environment is that of benchmarks/libero_lerobot.py.
Theirs is `eval_policy` of lerobot/scripts/lerobot_eval.py with LeRobot's vector environment, starts, rest and longest
episodes; ours is what `genrl eval` does with its protocol `lerobot`, one slot. Both begin an episode's first chunk with
the same noise. The places of the things, which LeRobot's observation lacks, are read from its simulator. Pictures,
which the policy does not read, are black and so not drawn, unless `--pictures`. Figures: docs/vla_simulators.md.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.scripts.lerobot_eval import eval_policy
from torch import Tensor, nn

from benchmarks.common import parser, save
from benchmarks.libero_lerobot import theirs
from genrl.config import load
from genrl.mdp.noise import generator
from genrl.vla.config.schema import VLAConfig
from genrl.vla.evaluate import chunk, evaluate
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch
from genrl.vla.rollout.sampling import Acting
from genrl.vla.setup import load_trained, open_tables, sampler_of
from genrl.vla.simulators.libero.env import THINGS, LiberoEnv

SEED = 1000
"""lerobot-eval's."""
PLACES = [0, 1, 2, *(8 + 7 * thing + axis for thing in range(THINGS) for axis in range(3))]
"""Of the hand and the things in a row of `numbers`."""
APART = 1e-3
"""Metres from which on two courses of one start are not the same."""


class Ours(PreTrainedPolicy):  # type: ignore[misc]
    """A policy of a run as LeRobot's loop asks it, in a vector environment of one slot.

    shown: what it read at each decision of each episode; steps: how many actions each took.
    """

    config_class, name = PreTrainedConfig, "genrl"

    def __init__(self, who: Acting, size: int, seed: int, things: Callable[[], Any]) -> None:
        nn.Module.__init__(self)
        self.who, self.size, self.seed, self.things = who, size, seed, things
        self.shown: list[list[Tensor]] = []
        self.steps: list[int] = []

    def reset(self) -> None:
        """Begin the next episode, with the noise that ours has for it."""
        self.rng, self.planned = generator(self.seed, "evaluation", len(self.steps)), list[Tensor]()
        self.shown.append([])
        self.steps.append(0)

    def select_action(self, batch: dict[str, Any], **_: Any) -> Tensor:
        """The next action [1, A] of the chunk, or the first one of a new chunk."""
        if not self.planned:
            policy = self.who.policy
            things = torch.from_numpy(self.things()).float().reshape(1, -1)
            seen = {STATE: batch[STATE], ENVIRONMENT: things, TOKENS: policy.tokenise(batch["task"])}
            seen = {name: seen[name] for name in policy.inputs}
            noise = torch.randn((1, policy.horizon, policy.action_dim), generator=self.rng)
            self.planned = list(chunk(self.who, seen, noise)[:, : self.size].unbind(1))
            self.shown[-1].append(numbers(seen))
        self.steps[-1] += 1
        return self.planned.pop(0)


Ours.__abstractmethods__ = frozenset()  # what training would ask for


def numbers(seen: Batch) -> Tensor:
    """What the policy read in its first slot, one row."""
    return torch.cat([seen[name][0] for name in (STATE, ENVIRONMENT)])


Course = tuple[list[bool], list[int], list[list[Tensor]]]
"""Success and number of actions of each episode, and what the policy read at each of its decisions."""


def by_lerobot(who: Acting, config: VLAConfig, size: int, given: Namespace) -> Course:
    """The first starts in LeRobot's loop."""
    vector, before = theirs(config.environment.tasks[0])
    inner = vector.envs[0].unwrapped
    policy = Ours(who, size, config.evaluation.seed, lambda: LiberoEnv.things(SimpleNamespace(env=inner._env)))  # type: ignore[arg-type]
    if not given.pictures:
        from robosuite.utils.binding_utils import MjSim

        MjSim.render = lambda self, width, height, **_: np.zeros((height, width, 3), np.uint8)

    def same(value: Any) -> Any:
        return value

    judged = eval_policy(vector, policy, before, same, same, same, n_episodes=given.episodes, start_seed=SEED)
    vector.close()
    return [bool(episode["success"]) for episode in judged["per_episode"]], policy.steps, policy.shown


def by_ours(who: Acting, config: VLAConfig, given: Namespace) -> Course:
    """The same starts in ours."""
    shown: list[list[Tensor]] = [[]]
    with closing(open_tables(config, who.policy, num_envs=1)) as env:
        judged = evaluate(
            who,
            env,
            episodes=given.episodes,
            seed=config.evaluation.seed,
            watch=lambda seen, actions: shown[-1].append(numbers(seen)),
            advance=lambda ended: shown.append([]) if ended else None,
        )
    return judged.success, judged.steps, shown[:-1]


def parted(there: list[Tensor], here: list[Tensor]) -> int | None:
    """The first decision of two courses before which the hand or a thing lay elsewhere."""
    far = [float((a - b)[PLACES].abs().max()) > APART for a, b in zip(there, here, strict=False)]
    return far.index(True) if any(far) else None


def rate(success: list[bool]) -> dict[str, float]:
    """Success with its standard error."""
    share = sum(success) / len(success)
    return {"success": share, "error": round(math.sqrt(share * (1 - share) / len(success)), 4)}


def compared(run: Path, given: Namespace) -> dict[str, Any]:
    """Both evaluations of a run's policy, and where they differ."""
    own = load(run / "config.yaml")
    config = load(run / "config.yaml", ["environment.max_steps=null", "environment.workers=0"])
    assert isinstance(own, VLAConfig) and isinstance(config, VLAConfig)
    policy = load_trained(run)
    who = Acting(policy, sampler_of(config, policy))
    courses = {
        "genrl": by_ours(who, config, given),
        "lerobot": by_lerobot(who, config, config.environment.chunk or policy.horizon, given),
    }
    (here, steps_here, shown_here), (there, steps_there, shown_there) = courses.values()
    starts = zip(shown_there, shown_here, strict=True)
    row: dict[str, Any] = {"run": str(run), "task": config.environment.tasks[0]}
    for name, (success, steps, _) in courses.items():
        limit = own.environment.max_steps or max(steps)
        within = [flag and count <= limit for flag, count in zip(success, steps, strict=True)]
        row[name] = rate(success) | {f"within_{limit}": rate(within), "actions": steps}
    row["first_numbers_apart"] = max(float((a[0] - b[0]).abs().max()) for a, b in starts)
    row["other_outcome"] = [k for k in range(len(there)) if there[k] != here[k]]
    row["other_length"] = [k for k in range(len(there)) if steps_there[k] != steps_here[k]]
    row["parted_at_decision"] = {
        k: decision for k in range(len(there)) if (decision := parted(shown_there[k], shown_here[k])) is not None
    }
    print(row, flush=True)
    return row


def main() -> None:
    given = parser(__doc__)
    given.add_argument("runs", nargs="+", type=Path)
    given.add_argument("--episodes", type=int, default=50, help="listed starts, from the first on; default: all 50")
    given.add_argument("--pictures", action="store_true", help="draw LeRobot's pictures, which takes most of its time")
    asked = given.parse_args()
    save(asked.out, "libero_success", [compared(run, asked) for run in asked.runs])


if __name__ == "__main__":
    main()
