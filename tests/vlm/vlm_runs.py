"""Tiny whole runs of a vision-language model on the CPU: the embedded model, sixteen answers an iteration."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.rollout.data import Questions
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import KIND
from tests import opened as opening
from tests.run_folders import start_ranks, wait

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny-vlm"


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    """The YAML of a tiny run in `place`; `changes` are sections, merged key by key; a trainer that names
    its algorithm stands in place of grpo."""
    tree: dict[str, Any] = {
        "vlm": {"path": str(MODEL)},
        "task": {"name": "shapes"},
        "generation": {"prompts_per_iteration": 4, "group_size": 4, "max_new_tokens": 12},
        "rewards": [{"name": "exact"}, {"name": "tag_format", "weight": 0.2}],
        "trainer": {"preset": "grpo"},
        "optimizer": {"lr": 1e-4},
        "evaluation": {"every": 0, "questions": 8},
        "checkpoint": {"every": 1},
        "trackers": [],
        "iterations": 1,
        "output": str(place / "run"),
    }
    for section, change in changes.items():
        old = tree.get(section)
        merged = isinstance(old, dict) and isinstance(change, Mapping) and "algorithm" not in change
        tree[section] = {**old, **change} if merged else change
    return {name: section for name, section in tree.items() if section is not None}


def config(place: Path, **changes: Any) -> VLMConfig:
    """`settings` through a YAML file and the loader, as the command line would."""
    path = place / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(place, **changes)), encoding="utf-8")
    return load(path)


def low(place: Path) -> dict[str, str]:
    """A reward that random weights, which are never right, can learn: that their bytes are small."""
    file = place / "low.py"
    file.write_text("def low(completions):\n    return [sum(c < 'P' for c in t) / 12 for t in completions]\n")
    return {"name": f"{file}:low"}


@contextmanager
def opened(settings: VLMConfig) -> Iterator[AnswersRun]:
    """A new run, as `train` opens it: for tests that look at a method from inside."""
    with opening.opened(settings, KIND) as run:
        yield run


def in_processes(
    place: Path, target: Callable[..., None], *arguments: object, count: int = 2, machines: int = 1
) -> None:
    """place/tiny.yaml in so many processes, all of which end well."""
    texts = [str(place / "tiny.yaml"), *map(str, arguments)]
    processes = start_ranks(count, target, *texts, log=place / "log.txt", machines=machines)
    assert wait(processes, 300) == [0] * count, [path.read_text()[-2000:] for path in sorted(place.glob("log*"))]


def first_question(settings: VLMConfig) -> Prompt:
    """Of those that a run trains on."""
    return Questions(settings, "train")[0].prompt
