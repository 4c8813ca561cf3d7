"""Prompt economy without a model: what a choice of prompts avoids when success rates are known to change as simulated.

    python -m benchmarks.economy                     # the last table of docs/economy.md, in seconds

Runs with models are those of benchmarks/claims.yaml, group `economy`. Results: benchmarks/results/economy.json.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import mean, stdev

import torch

from genrl.config.sections import Replay, Selection
from genrl.mdp.noise import prompt_indices
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.loop.economy import NOTHING, choose, looked_at, noted

RESULTS = Path("benchmarks/results/economy.json")
DRIFTS = (0.0, 0.03)
SIMULATED = {
    "all": None,
    "by success": Selection(by="success"),
    "by spread": Selection(by="spread"),
    "replay": Selection(by="success", candidates=1, replay=Replay()),
}


def idle_groups(settings: Selection | None, seed: int, drift: float) -> float:
    """Share of groups of 8 that all fail or all succeed, over 100 iterations of 16 of 256 prompts: their success rates
    are drawn from Beta(.4, .4), and their log-odds rise by `drift` in an iteration."""
    source, known, idle = random.Random(seed), NOTHING, []
    rates = [min(max(source.betavariate(0.4, 0.4), 1e-6), 1 - 1e-6) for _ in range(256)]
    for iteration in range(100):
        pool = prompt_indices(256, looked_at(settings, 16), seed=seed, iteration=iteration)
        chosen = choose(settings, pool, 16, known, iteration=iteration, seed=seed)
        now = [1 / (1 + (1 - rates[n]) / rates[n] * math.exp(-drift * iteration)) for n in chosen]
        won = torch.tensor([[float(source.random() < rate) for _ in range(8)] for rate in now])
        idle.append(float((won.std(1) == 0).double().mean()))
        if settings is not None:
            known, _ = noted(settings, known, chosen, won, iteration=iteration)
    return round(mean(idle), 4)


def table(found: dict[str, list[float]]) -> str:
    lines = ["| choice | groups without spread: rates stay | log-odds rise by .03 an iteration |", "| --- " * 3 + "|"]
    for way in SIMULATED:
        runs = [found[f"simulated-{way}-{drift}"] for drift in DRIFTS]
        lines.append(f"| {way} | {' | '.join(f'{mean(run):.3f} ± {stdev(run):.3f}' for run in runs)} |")
    return "\n".join(lines)


def main() -> None:
    found = {
        f"simulated-{way}-{drift}": [idle_groups(settings, seed, drift) for seed in range(3)]
        for way, settings in SIMULATED.items()
        for drift in DRIFTS
    }
    write_atomic(RESULTS, json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
