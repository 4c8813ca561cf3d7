"""How low FISOR's cost on the hazard table goes if the simulator, and not Q_h, chooses among the actor's samples.

    python -m benchmarks.fisor_choice RUN ...        # finished runs of configs/vla/fisor.yaml, one for each seed

Choices among N samples of the trained actor: by Q_h, as FISOR makes it (`q_h`); by whether the action ends in a hazard
(`next`); by how many of 16 actions that the actor would take after it end in one, too (`following`). Where all samples
end in a hazard, the last two take the one that ends farthest from the disc. Told are the figures of an evaluation, and
of the decisions that ended in a hazard, how many entered it, how many stayed in it, and how many of both had another
sample that ends outside. benchmarks/results/fisor_choice.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import RESULTS
from genrl.config import load
from genrl.playground.minitable import task
from genrl.playground.minitable.task import Floats, State
from genrl.playground.minitable.world import HAZARD, in_hazard, nearest_hazard
from genrl.playground.minitable.world import seen as table_numbers
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.weights import state
from genrl.vla.config.schema import VLAConfig
from genrl.vla.methods.fisor import train as fisor
from genrl.vla.methods.fisor.settings import FISOR
from genrl.vla.offline.transitions import play
from genrl.vla.policies.policy import ENVIRONMENT, STATE, Batch, rows
from genrl.vla.rollout.sampling import Diffusion
from genrl.vla.setup import load_trained

FILE = RESULTS / "fisor_choice.json"
CHOICES = (("q_h", 16), ("q_h", 64), ("next", 16), ("following", 16))
FARTHEST = 10.0
"""More than any distance on the table."""


class Trained(NamedTuple):
    """A finished run."""

    config: VLAConfig
    nets: fisor.Fisor
    sampler: Diffusion


def trained(folder: Path) -> Trained:
    """The newest checkpoint of a run."""
    config = load(folder / "config.yaml")
    assert isinstance(config, VLAConfig) and isinstance(config.trainer, FISOR)
    nets = fisor.Fisor(load_trained(folder))
    last_checkpoint = checkpoint.latest(folder / "checkpoints")
    assert last_checkpoint is not None
    saved = checkpoint.load(last_checkpoint)
    kept = state.unpack(saved.tensors["kept-fisor"], saved.state["kept"]["fisor"])["modules"]
    nets.reward.load_state_dict(kept["reward"])
    nets.violation.load_state_dict(kept["violation"])
    nets.slow_actor.load_state_dict(kept["slow"])
    return Trained(config, nets, fisor.sampler_of(nets.actor))


def judged(run: Trained, choice: str, candidates: int) -> dict[str, Any]:
    """The evaluation of a run, with another choice among so many samples."""
    config, nets, sampler = run
    seed, counts = config.evaluation.seed, Counter[str]()
    over = np.zeros(config.evaluation.episodes, dtype=np.bool_)

    @torch.no_grad()
    def behave(observation: Batch, decision: int) -> Tensor:
        over[:] |= task.is_success(env.state) & (decision > 0)  # an episode ends there
        alive = torch.from_numpy(np.flatnonzero(~over))
        count, taken = len(alive), torch.zeros(len(over), 1, 3)
        if not count:
            return taken
        now, seen = env.state.rows(alive.numpy()), rows(observation, alive)
        noise = fisor.chain_noise(nets, sampler, len(over), decision, candidates=candidates, seed=seed)[alive]
        chunks = fisor.samples(nets, sampler, seen, noise)
        after = task.step(now.rows(np.arange(count).repeat(candidates)), chunks.reshape(-1, 3).numpy())
        unsafe = torch.from_numpy(in_hazard(after)).view(count, candidates)
        if choice == "q_h":
            score = fisor.risks(nets, seen, chunks)
        else:
            farther = torch.from_numpy(nearest_hazard(after)).view(count, candidates)
            score = torch.where(unsafe, FARTHEST - farther, 0.0)
            if choice == "following":
                score += torch.from_numpy(blocked(run, seen, after, decision)).view(count, candidates)
        best = score.argmin(1)
        hit, inside, other = unsafe[torch.arange(count), best], torch.from_numpy(in_hazard(now)), (~unsafe).any(1)
        counts.update(entered=int((hit & ~inside).sum()), stayed=int((hit & inside).sum()))
        counts.update(could_stay_out=int((hit & ~inside & other).sum()), could_leave=int((hit & inside & other).sum()))
        taken[alive] = chunks[torch.arange(count), best]
        return taken

    with closing(fisor.table(config, config.evaluation.episodes)) as env:
        played = play(env, behave, nets.slow_actor, decisions=env.max_steps, seed=seed, one_episode=True)
    return fisor.judged(played) | counts


def blocked(run: Trained, seen: Batch, after: State, decision: int) -> Floats:
    """Of tables [B N] after a decision whose observations were seen [B]: the share of 16 actions of the actor that end
    in a hazard; 0 where the table is in one, far from all, or done."""
    _, nets, sampler = run
    distance, share = nearest_hazard(after), np.zeros(len(after.task), dtype=np.float32)
    asked = np.flatnonzero((distance >= HAZARD) & (distance < HAZARD + 2 * task.REACH) & ~task.is_success(after))
    if len(asked):
        numbers = torch.from_numpy(table_numbers(after.rows(asked)))
        words = rows(seen, torch.from_numpy(asked) // (len(share) // len(seen[STATE])))
        observation = words | {STATE: numbers[:, :3], ENVIRONMENT: numbers[:, 3:]}
        noise = fisor.chain_noise(nets, sampler, len(asked), decision, candidates=16, seed=1)
        actions = fisor.samples(nets, sampler, observation, noise).reshape(-1, 3).numpy()
        share[asked] = in_hazard(task.step(after.rows(asked.repeat(16)), actions)).reshape(-1, 16).mean(1)
    return share


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", nargs="+", type=Path)
    for folder in arguments.parse_args().runs:
        run = trained(folder)
        for choice, candidates in CHOICES:
            known = json.loads(FILE.read_text()) if FILE.exists() else {}
            begun = time.process_time()
            result = {"seed": run.config.seed, **judged(run, choice, candidates)}
            result["cpu_s"] = round(time.process_time() - begun, 1)
            name = f"{choice} of {candidates}"
            others = [one for one in known.get(name, []) if one["seed"] != run.config.seed]
            write_atomic(FILE, json.dumps(known | {name: [*others, result]}, indent=1) + "\n")
            print(name, result, flush=True)


if __name__ == "__main__":
    main()
