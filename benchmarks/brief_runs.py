"""Which configurations train on the embedded models, and the overrides that make two iterations of them brief.

For `same_numbers`; imports no genrl, since what it says has to hold for configurations of other commits, too. Brief
iterations still evaluate before and after, step the optimiser in each and save each; what a file does every so many
iterations (move a window, renew a reference) it does in each.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import yaml

Tree = dict[str, Any]
Overrides = dict[str, float | str]

SIMULATORS = {
    **{name: name for name in ("metaworld", "libero")},
    **{name: "gymnasium_robotics" for name in ("point_maze", "fetch")},
    "reacher": "gymnasium_robotics",
}
"""Names of environments that need a package, and the module that shows it installed."""

PICTURES: Overrides = {"evaluation.num_prompts": 6}
LANGUAGE: Overrides = {"evaluation.questions": 12}
ROBOTS: Overrides = {"evaluation.episodes": 16, "evaluation.videos": 2, "environment.num_envs": 32}

BY_ALGORITHM: dict[str, Overrides] = {
    "archer": {  # as much as a first success takes: without one there is no gradient
        **{"environment.max_steps": 24, "environment.steps": 16, "trainer.batch_size": 256},
        **{"trainer.critic.updates": 2, "trainer.updates": 1},
    },
    "ppo": {"trainer.critic_warmup": 0},
    "rlfr": {"trainer.flow.pretraining": 2},
    "sft": {"trainer.steps_per_iteration": 4},
    "diwa": {  # as much as a first success in the model of the world takes: without one there is no gradient
        **{"trainer.critic_warmup": 0, "trainer.world.tables": 100, "trainer.world.steps": 100},
        **{"trainer.imitation_steps": 20, "trainer.classifier.steps": 100},
        "demonstrations.expert": 100,
    },
    "fisor": {"trainer.steps_per_iteration": 10, "trainer.episodes": 64},
    "rl100": {
        **{"trainer.rounds": 1, "trainer.episodes": 64, "trainer.imitation_steps": 20, "trainer.critic_steps": 20},
        **{
            "trainer.dynamics_steps": 20,
            "trainer.steps_per_iteration": 20,
            "trainer.union_steps": 10,
            "trainer.distil_steps": 10,
        },
    },
    "recap": {"trainer.steps_per_iteration": 10, "trainer.episodes": 64, "trainer.critic_steps": 20},
    "v_ptr": {"trainer.steps_per_iteration": 10, "trainer.episodes": 64, "trainer.critic_steps": 20},
    "rl_vlm_f": {
        **{"trainer.steps_per_iteration": 10, "trainer.episodes": 64, "trainer.critic_steps": 20},
        **{"trainer.labels.pairs": 40, "trainer.labels.steps": 10, "trainer.labels.rounds": 2},
    },
}
"""`trainer.algorithm` -> overrides of its own. Warm-ups that train a critic alone would take both iterations."""

WHERE_SET: Overrides = {
    "demonstrations.expert": 16,
    "environment.parallel": 8,
    "environment.steps": 8,
    "generation.staleness": 1,
    "task.curriculum.over": 2,
    "task.passes": 2,
    "trainer.adversary.warmup": 1,
    "trainer.reference_every": 1,
    "trainer.tree.prune.slide_every": 1,
    "trainer.updates_per_iteration": 1,
    "trainer.window.every": 1,
}
"""Replaced only in files that say something else."""


def load(file: Path) -> Tree:
    """A YAML file with what it includes beneath it."""
    tree: Tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    parent = tree.pop("include", None)
    return _merged(load(file.parent / parent), tree) if parent else tree


def _merged(below: Tree, above: Tree) -> Tree:
    both = {
        key: _merged(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return below | above | both


def value(tree: Tree, key: str) -> Any:
    """What stands at `a.b.c`; None where nothing does."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def left_out(tree: Tree, root: Path) -> str | None:
    """Why a configuration cannot be run in the repository `root` without a download; None where it can."""
    for key in ("model.path", "vlm.path", "policy.path"):
        path = value(tree, key)
        if path is not None and not (path.startswith("assets/") and (root / path).is_dir()):
            return f"{key} {path} is not among the embedded models"
    if url := value(tree, "trainer.labels.remote"):
        return f"trainer.labels.remote {url} is a server that is not started here"
    if judge := value(tree, "trainer.labels.args.model"):
        return f"trainer.labels.args.model {judge} is what another run makes"
    name = value(tree, "environment.name")
    if name in SIMULATORS and find_spec(SIMULATORS[name]) is None:
        return f"the package {SIMULATORS[name]} is not installed"
    if name == "miniwob":
        lacking = [program for program in ("chromium", "chromedriver") if which(program) is None]
        lacking += [] if find_spec("miniwob") else ["the package miniwob"]
        return f"miniwob needs {', '.join(lacking)}" if lacking else None
    return None


def overrides(tree: Tree, iterations: int) -> Overrides:
    """Key -> value for brief runs of a configuration: so many iterations, or one of each of its stages."""
    iterations = max(iterations, len(tree.get("stages") or ()))
    small: Overrides = {"iterations": iterations, "evaluation.every": iterations, "checkpoint.every": 1}
    if "model" in tree:
        small |= PICTURES | _samples(tree)
    elif "vlm" in tree:
        small |= LANGUAGE | _answers(tree, iterations)
    else:
        small |= ROBOTS
    small |= {key: number for key, number in WHERE_SET.items() if value(tree, key) is not None}
    if value(tree, "environment.name") == "miniwob":
        small["environment.parallel"] = 2  # browsers
    algorithm = str(value(tree, "trainer.algorithm"))
    if algorithm == "sft" and ("vlm" in tree or "model" in tree):  # that of robots has keys of its own
        return small | ({"trainer.batch_size": 8} if "vlm" in tree else {})
    return small | BY_ALGORITHM.get(algorithm, {})


def _samples(tree: Tree) -> Overrides:
    """Two groups (or a few samples that are not compared) in two micro-batches, whole groups where the file has them
    whole, so that two processes have something to do."""
    group, batch = value(tree, "sampling.group_size") or 8, value(tree, "sampling.batch_size") or 8
    if group < 4:
        return {"sampling.prompts_per_iteration": 12 // group, "sampling.batch_size": 6}
    whole = batch % group == 0
    return {"sampling.prompts_per_iteration": 2, "sampling.batch_size": group if whole else group + group // 3}


def _answers(tree: Tree, iterations: int) -> Overrides:
    small: Overrides = {}
    grid = value(tree, "environment.name") == "grid"  # episodes of many short answers
    if value(tree, "generation.prompts_per_iteration") is not None:
        group = value(tree, "generation.group_size") or 8
        small["generation.prompts_per_iteration"] = 2 if grid else 4 if group > 1 else 16
    if grid:
        small |= {"environment.max_steps": 12, "evaluation.questions": 6}
    if value(tree, "task.name") is not None:
        small["task.rows"] = 64
    if value(tree, "trainer.critic") is not None:
        small["trainer.critic.warmup"] = 0
    if value(tree, "trainer.preset") == "grpo_care":  # its average follows every 10 steps: in the first iteration, too
        small |= {"trainer.updates": 4, "trainer.epochs": 3}
    stages = tree.get("stages") or ()
    for number in range(len(stages)):  # one iteration of each, the last one has what is left
        last = number == len(stages) - 1
        small[f"stages.{number}.iterations"] = iterations - number if last else 1
    return small
