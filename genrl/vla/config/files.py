"""Checks of a policy's run against the disk: its folder, its demonstrations, its simulator, files of your own.

What an OpenVLA's folder says of the data sets that it was trained on. No torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from genrl.config.folders import file_problem, is_hub_id, read_json, weights_problem
from genrl.config.plugins import names
from genrl.config.run_config import FileFinding
from genrl.config.yaml_source import KeyPath
from genrl.vla.config.names import PREDICTS, SAMPLERS, SIMULATORS
from genrl.vla.config.schema import VLAConfig, not_trained
from genrl.vla.config.sections import OFT
from genrl_rewards.extras import install
from genrl_rewards.given import given, is_given

PACKAGES = {
    "metaworld": ("metaworld", "metaworld"),
    "point_maze": ("gymnasium_robotics", "robotics"),
    "fetch": ("gymnasium_robotics", "robotics"),
    "reacher": ("gymnasium_robotics", "robotics"),
    "maniskill": ("mani_skill", "pip install mani-skill"),
}
"""The module that shows a simulator installed, and the extra that has it, or what installs it."""


def file_problems(config: VLAConfig, notes: list[str]) -> Iterator[FileFinding]:
    """What is wrong; remarks that stop nothing go to `notes`."""
    yield from _policy(config, notes)
    yield from _demonstrations(config, notes)
    yield from _simulator(config, notes)


def _policy(config: VLAConfig, notes: list[str]) -> Iterator[FileFinding]:
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
    if is_hub_id(config.policy.path):
        notes.append(f"policy.path: {config.policy.path} is on the hub: downloaded when a run begins, not checked here")
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
    elif is_openvla(openvla_config := _json(file)):
        yield from _openvla(config, file.parent)
        yield from ((key, f"{file.parent} {text}") for text in [weights_problem(file.parent)] if text)
    elif "output_features" not in openvla_config:
        yield key, f"{file} does not describe a policy: it has no output_features"
    else:
        kind = str(openvla_config.get("type"))
        yield from _own_code(key, kind, "Name", notes)
        if ":" not in kind and (problem := _weights_problem(file.parent)):  # one's own writes what it likes
            yield key, f"{file.parent} {problem}"
        predicts = PREDICTS.get(kind, config.sampler.predicts)
        if predicts not in config.trainer.trains:
            yield ("trainer", "algorithm"), f"{path} is of type {kind}: {not_trained(config.trainer, predicts)}"
        elif predicts != config.sampler.predicts:
            yield (
                ("sampler", "kind"),
                f"{path} is of type {kind}, which predicts {predicts}; write {SAMPLERS[predicts]}",
            )
        executed, held = config.environment.chunk, openvla_config.get("chunk_size")
        if executed is not None and isinstance(held, int) and executed > held:
            yield ("environment", "chunk"), f"{executed} actions cannot be executed of chunks of {held}"


def _weights_problem(folder: Path) -> str | None:
    """Why the weights of a policy cannot be loaded; its statistics are in files of their own beside them."""
    single_file = folder / "model.safetensors"
    if single_file.is_file():
        problem = file_problem(single_file)
        return problem and f"{single_file.name} {problem}"
    shards = (folder / "model.safetensors.index.json").is_file()
    return weights_problem(folder) if shards else "holds no weights: there is no model.safetensors in it"


def _openvla(config: VLAConfig, folder: Path) -> Iterator[FileFinding]:
    """What an OpenVLA-OFT needs to be told. A folder of ours says it itself."""
    sampler, oft_settings = config.sampler, _json(folder / "oft.json") if (folder / "oft.json").is_file() else {}
    settings = OFT.model_validate(
        oft_settings | (config.policy.oft.model_dump(exclude_unset=True) if config.policy.oft else {})
    )
    predicted = "actions" if any(folder.glob("action_head--*.pt")) else "tokens"
    if sampler.predicts != predicted:
        kind = "tokens" if predicted == "tokens" else "regression"
        yield ("sampler", "kind"), f"{sampler.kind} does not fit {folder}, which predicts {predicted}; write {kind}"
    try:
        data_set(data_sets(folder), settings.unnorm_key, folder)
    except ValueError as error:
        yield ("policy", "oft", "unnorm_key"), str(error).removeprefix("policy.oft.unnorm_key: ")
    executed, held = config.environment.chunk, settings.chunk
    if executed is not None and executed > held:
        yield ("environment", "chunk"), f"{executed} actions cannot be executed of chunks of {held}"


def _demonstrations(config: VLAConfig, notes: list[str]) -> Iterator[FileFinding]:
    source, key = config.demonstrations.dataset if config.demonstrations else None, ("demonstrations", "dataset")
    if source is None:
        return
    path = Path(source)
    if is_hub_id(source):
        notes.append(f"demonstrations.dataset: {source} is on the hub: downloaded when a run begins, not checked here")
    elif is_recording(path):
        if not path.exists():
            close = get_close_matches(path.name, [file.name for file in path.parent.glob("*.h*5")], n=1, cutoff=0.3)
            yield key, f"there is no file {path}" + (f"; did you mean {path.parent / close[0]}?" if close else "")
        elif importlib.util.find_spec("h5py") is None:
            yield key, f"the package h5py, which reads {path}, is not installed: {install('h5py')}"
    elif not (path / "meta" / "info.json").is_file():
        yield key, f"{path} is no LeRobotDataset v3: there is no meta/info.json in it"
    elif config.trainer.algorithm == "fisor":
        yield key, f"{path} is a LeRobotDataset, which has no costs: give a file of DSRL's, or a folder of Minari's"


def is_recording(path: Path) -> bool:
    """Whether a path names a file of steps (DSRL's, .hdf5), or a folder of Minari's."""
    return path.suffix in (".hdf5", ".h5") or (path / "data" / "metadata.json").is_file()


def _simulator(config: VLAConfig, notes: list[str]) -> Iterator[FileFinding]:
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
    if name == "libero":
        yield from _libero(config)
    elif name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        package, extra = PACKAGES[name]
        yield key, f"the package {package} is not installed: {extra if ' ' in extra else install(extra)}"
    elif not (simulators := names(SIMULATORS)).count(name) and not any(
        mark in name for mark in ("/", "-v", ":", ".py")
    ):
        close = get_close_matches(name, simulators, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        text = (
            f"no environment {name!r}{hint}; there are {', '.join(simulators)}, gymnasium ids and path/file.py:function"
        )
        yield key, text
    if workers in ("ray", "ray_simulators") and importlib.util.find_spec("ray") is None:
        yield ("environment", "workers"), f"the package ray is not installed: {install('ray')}"


def _libero(config: VLAConfig) -> Iterator[FileFinding]:
    """What of LIBERO's packages is missing; its suites, tasks and protocol."""
    from genrl.vla.simulators.libero import package

    settings = config.environment.args
    yield from ((("environment", "name"), line) for line in package.missing(str(settings.get("assets", ""))))
    try:
        package.chosen(config.environment.tasks or (), settings)
    except ValueError as error:
        yield ("environment", "args" if "environment.args" in str(error) else "tasks"), str(error)


def _own_code(key: KeyPath, name: str, example: str, notes: list[str]) -> Iterator[FileFinding]:
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
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


STATISTICS = "dataset_statistics.json"
"""Of a fine-tuned model; a pretrained one has them in config.json, as `norm_stats`."""


def is_openvla(config: dict[str, Any]) -> bool:
    """Whether a folder's config.json is that of an OpenVLA."""
    return config.get("model_type") == "openvla"


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    """Statistics by name of the data set."""
    return (read_json(folder / "config.json").get("norm_stats") or {}) | read_json(folder / STATISTICS)


def data_set(names: Iterable[str], key: str | None, folder: Path) -> str:
    """The name that `unnorm_key` means: itself, itself with _no_noops, as RLinf and SimpleVLA-RL read it, or the only
    one. Raises ValueError naming the nearest ones."""
    available = sorted(names)
    if key is None and len(available) == 1:
        return available[0]
    for name in (key, f"{key}_no_noops"):
        if name in available:
            return str(name)
    listed = get_close_matches(key or "", available, n=3, cutoff=0.0) if key else available[:3]
    problem = f"found {key!r}" if key else "nothing is written"
    text = f"must name one of the {len(available)} data sets that {folder} has statistics of, {problem}"
    raise ValueError(f"policy.oft.unnorm_key: {text}; the nearest: {', '.join(listed) or 'none'}")
