"""Checks of a policy's run against the disk: its folder, its demonstrations, its simulator, files of your own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from genrl.config.plugins import names
from genrl.config.vla import VLAConfig
from genrl.config.vla_names import EMBEDDED, SIMULATORS
from genrl.config.vla_rules import of_layers
from genrl.config.yaml_source import KeyPath
from rewards.given import given, is_given

Wrong = tuple[KeyPath, str]

PACKAGES = {
    "metaworld": ("metaworld", "'genrl-diffusion[metaworld]'"),
    "point_maze": ("gymnasium_robotics", "'genrl-diffusion[robotics]'"),
    "fetch": ("gymnasium_robotics", "'genrl-diffusion[robotics]'"),
    "maniskill": ("mani_skill", "mani-skill"),
    "libero": ("libero", "hf-libero"),
}
"""The module that shows a simulator installed, and what pip calls it."""


def vla_files(config: VLAConfig, notes: list[str]) -> Iterator[Wrong]:
    """What is wrong; remarks that stop nothing go to `notes`."""
    yield from _policy(config, notes)
    yield from _demonstrations(config)
    yield from _simulator(config, notes)


def _policy(config: VLAConfig, notes: list[str]) -> Iterator[Wrong]:
    """A folder with a policy in LeRobot's layout, or of a run that trained one; or a class of your own."""
    if config.policy.new is not None:
        yield from _own_code(("policy", "new", "type"), config.policy.new.type, "Name", notes)
    if config.policy.path is None:
        return
    if is_given(config.policy.path):
        try:
            given(config.policy.path)
        except ValueError as error:
            yield ("policy", "path"), str(error)
        return
    path, key = Path(config.policy.path).expanduser(), ("policy", "path")
    file = next((f for f in (path / "config.json", path / "policy" / "config.json") if f.is_file()), None)
    if not path.is_dir():
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        close = get_close_matches(path.name, beside, n=1, cutoff=0.5)
        hint = f"; did you mean {path.parent / close[0]}?" if close else "; download it first, or train one by sft"
        yield key, f"there is no folder {path}{hint}"
    elif file is None:
        yield key, f"{path} has no config.json: it is neither a policy's folder nor the run of one"
    elif "output_features" not in (told := _json(file)):
        yield key, f"{file} does not describe a policy: it has no output_features"
    else:
        kind = str(told.get("type"))
        yield from _own_code(key, kind, "Name", notes)
        for asked in of_layers(config) if kind in (*EMBEDDED, "diffusion") else ():
            yield tuple(asked.split(".")), f"is for pi0, pi0.5 and SmolVLA; {path} is a {kind}: leave it out"
        executed, held = config.environment.chunk, told.get("chunk_size")
        if executed is not None and isinstance(held, int) and executed > held:
            yield ("environment", "chunk"), f"{executed} actions cannot be executed of chunks of {held}"


def _demonstrations(config: VLAConfig) -> Iterator[Wrong]:
    source = config.demonstrations.dataset if config.demonstrations else None
    if source is not None and not (Path(source) / "meta" / "info.json").is_file():
        text = f"{source} is no LeRobotDataset v3: there is no meta/info.json in it"
        yield ("demonstrations", "dataset"), text


def _simulator(config: VLAConfig, notes: list[str]) -> Iterator[Wrong]:
    """A simulator that is installed."""
    name, workers, key = config.environment.name, config.environment.workers, ("environment", "name")
    if is_given(name):
        try:
            given(name)
        except ValueError as error:
            yield key, str(error)
        if workers:
            text = "the environment was made in this process and cannot be sent to another"
            yield ("environment", "workers"), f"{text}; write 0, or put the function into a file: path/file.py:name"
        return
    yield from _own_code(key, name, "make", notes)
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        yield key, f"the package {PACKAGES[name][0]} is not installed: pip install {PACKAGES[name][1]}"
    elif not (known := names(SIMULATORS)).count(name) and not any(mark in name for mark in ("/", "-v", ":", ".py")):
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        text = f"no environment {name!r}{hint}; there are {', '.join(known)}, gymnasium ids and path/file.py:function"
        yield key, text
    if workers in ("ray", "ray_simulators") and importlib.util.find_spec("ray") is None:
        yield ("environment", "workers"), "the package ray is not installed: pip install 'genrl-diffusion[ray]'"


def _own_code(key: KeyPath, name: str, example: str, notes: list[str]) -> Iterator[Wrong]:
    """A file that a name stands for: whether it is there, and that it will run."""
    file, _, _ = name.rpartition(":")
    if name.endswith(".py"):
        yield key, f"say what of the file is meant: {name}:{example}"
    elif file.endswith(".py"):
        notes.append(f"{'.'.join(map(str, key))}: training runs the code of {file}")
        if not Path(file).is_file():
            yield key, f"there is no file {file}"


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where it is broken."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
