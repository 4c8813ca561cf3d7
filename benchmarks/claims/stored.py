"""Finished runs: one small JSON file each in benchmarks/runs, with what tables and claims read.

A file has: `config`, `changes`; `commit`, `versions`, `machine` (the processor's model), `processes`, `threads` (of
each); `cpu_s`, `wall_s`; `iterations`; `trained`, `logged` (rewards by their weight); `sampling_calls`,
`training_calls`; `curve`: columns over the evaluations, with what was spent by then (`kcalls`: thousand
forward-equivalents, `ksteps`: of the environment, `ktokens`: sampled); `last`: the last row of training; `means`: of
the recipe's metrics the first row, and the means over the first ten, all and the last ten; `noticed`: iteration, name
and value of each figure `collapse/...`; `diversity`: before and after. Runs from before this store lack what was not
recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.claims.plan import Recipe
from genrl.config import load
from genrl.runtime.folder.run import Run, read_metrics, run_info, write_atomic
from genrl.runtime.loop import collapse
from genrl.vla.config.schema import VLAConfig
from genrl.vlm.config.schema import VLMConfig

FOLDER = Path("benchmarks/runs")
TRAINING_CALL = 3
"""Forward-equivalents of a model call in training: one forward and a backward of two."""
DIGITS = 5

Stored = dict[str, Any]


def read(folder: Path = FOLDER) -> dict[str, Stored]:
    """Name and seed -> run."""
    files = sorted(folder.glob("*/*.json"))
    return {file.relative_to(folder).with_suffix("").as_posix(): json.loads(file.read_text()) for file in files}


def write(key: str, run: Stored, folder: Path = FOLDER) -> Path:
    file = folder / f"{key}.json"
    write_atomic(file, json.dumps(run, sort_keys=True, separators=(",", ":")).replace(',"', ',\n"') + "\n")
    return file


def of(stored: Mapping[str, Stored], name: str) -> dict[int, Stored]:
    """The runs of a recipe by seed."""
    keys = [key for key in stored if key.rpartition("-")[0] == name]
    return {int(key.rpartition("-")[2]): stored[key] for key in sorted(keys)}


def harvest(recipe: Recipe, run: Run) -> Stored:
    """What is kept of a finished run in its folder."""
    config, rows, info = load(run.config), read_metrics(run.metrics), run_info(run)
    trained = [row for row in rows if row["step"]]
    entry: Stored = {
        "config": recipe.config,
        "changes": list(recipe.changes),
        "commit": info.get("git_commit"),
        "versions": info.get("versions"),
        "machine": processor(),
        "threads": recipe.threads,
        "processes": recipe.processes,
        "iterations": rows[-1]["step"],
        "wall_s": round(sum(row.get("timing/iteration_s") or 0.0 for row in rows), 1),
        "sampling_calls": sum(row.get("model_calls/sample") or 0.0 for row in rows),
        "training_calls": sum(row.get("model_calls/train") or 0.0 for row in rows),
        "curve": curve(rows, _answers(config)),
        "last": {key: _short(value) for key, value in (trained or rows)[-1].items() if not key.startswith("eval")},
        "noticed": [
            [row["step"], key.partition("/")[2], _short(value)]
            for row in rows
            for key, value in sorted(row.items())
            if key.startswith(f"{collapse.KEY}/") and _number(value)
        ],
        "means": {key: means([row[key] for row in trained if _number(row.get(key))]) for key in recipe.means},
    }
    if not isinstance(config, VLAConfig):
        named = list(zip(config.reward_labels, (reward.weight for reward in config.rewards), strict=True))
        entry["trained"] = [name for name, weight in named if weight]
        entry["logged"] = [name for name, weight in named if not weight]
    return entry


def curve(rows: Sequence[Mapping[str, Any]], answers: int) -> dict[str, list[float | None]]:
    """Columns over the rows with an evaluation. answers: of an iteration of a language model."""
    spent, kept = {"kcalls": 0.0, "ksteps": 0.0, "ktokens": 0.0}, list[dict[str, float | None]]()
    for row in rows:
        calls = (row.get("model_calls/sample") or 0.0) + TRAINING_CALL * (row.get("model_calls/train") or 0.0)
        spent["kcalls"] += calls / 1000
        spent["ksteps"] = (row.get("rollout/env_steps") or 0.0) / 1000 or spent["ksteps"]
        tokens = (row.get("rollout/rounds") or 0.0) * (row.get("rollout/tokens_mean") or 0.0)
        spent["ktokens"] += answers * tokens / 1000
        own = {key: _short(value) for key, value in row.items() if key.startswith("eval") and _number(value)}
        if own:
            kept.append({"step": row["step"], **{key: _short(value) for key, value in spent.items()}, **own})
    keys = [key for key in _united(kept) if key not in spent or any(row[key] for row in kept)]
    return {key: [row.get(key) for row in kept] for key in keys}


def points(run: Stored, metric: str, per: str = "step") -> list[tuple[float, float]]:
    """(spent, value) at every evaluation that has both."""
    columns = run["curve"]
    pairs = zip(columns.get(per, []), columns.get(metric, []), strict=False)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def means(values: Sequence[float]) -> list[float | None]:
    """First, and the means over the first ten, all and the last ten."""
    if not values:
        return [None] * 4
    return [_short(values[0]), *(_short(mean(part)) for part in (values[:10], values, values[-10:]))]


def processor() -> str | None:
    """The model of the processor; no host is named."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _answers(config: object) -> int:
    if not isinstance(config, VLMConfig):
        return 0
    return config.generation.prompts_per_iteration * config.generation.group_size


def _united(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(key for row in rows for key in row)]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
