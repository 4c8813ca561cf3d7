"""Checks of a configuration against the disk: model folder, prompt files, rewards, trackers. No weights, no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import genrl_rewards
from genrl.config.errors import dotted
from genrl.config.folders import (
    arguments_problems,
    file_problem,
    hub_file,
    is_single_file,
    looks_local,
    nearest_beside,
    nearest_folder,
    pipeline_problems,
    read_json,
    scales_problem,
)
from genrl.config.plugins import Group, find
from genrl.config.run_config import FileFinding
from genrl.config.yaml_source import KeyPath
from genrl.data.prompts import PromptError, PromptRows, is_data_set
from genrl.data.prompts import read as read_prompts
from genrl.data.sizes import NAMES, short_bucket, sized, unread
from genrl.diffusion.config.estimate import context_problems, layer_problems, read_components, side_step
from genrl.diffusion.config.model_rules import (
    DENOISERS,
    experts_problem,
    missing_components,
    missing_packages,
)
from genrl.diffusion.config.pipeline_classes import (
    is_flow_scheduler,
    loop_problems,
    problems,
    replaced_schedule,
    scheduler_problems,
    scheduler_refusal,
    strength_problem,
    vae_problems,
)
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model, Reward
from genrl_rewards.built_in import BUILT_IN
from genrl_rewards.contract import FROM_SAMPLER, nearest
from genrl_rewards.extras import install
from genrl_rewards.given import given, is_given


def file_problems(config: Config, notes: list[str]) -> Iterator[FileFinding]:
    """What is wrong with the model's folder, the prompt files and the rewards; remarks that stop nothing go to
    `notes`."""
    yield from _model(config, notes)
    yield from _adapters(config, notes)
    yield from _prompts_and_rewards(config, notes)


def model_folder(config: Config) -> Path | None:
    """Folder of the pipeline (of a single file: of its base) on this machine, the hub's cache included; None if it must
    be downloaded first, or is an object of a script. ValueError where it is neither a folder nor a hub id."""
    named = config.model.config or config.model.path
    if is_given(named):
        return None
    folder = Path(named).expanduser()
    if folder.is_dir() or looks_local(named):
        return folder if folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(named, "model_index.json", revision=config.model.revision)
    return Path(index).parent if isinstance(index, str) else None


def _model(config: Config, notes: list[str]) -> Iterator[FileFinding]:
    yield from ((tuple(key.split(".")), text) for key, text in missing_packages(config.model))
    if config.engine is not None and importlib.util.find_spec("ray") is None:
        yield ("engine",), f"the package ray is not installed: {install('ray')}"
    if is_given(config.model.path):
        yield from _given_pipeline(config, notes)
        return
    if config.model.pipeline is not None:
        try:
            pipeline_class(config.model)
        except ValueError as error:
            yield ("model", "pipeline"), str(error)
        notes.append(f"model.pipeline: training runs the code of {config.model.pipeline}")
    key: KeyPath = ("model", "config" if config.model.config else "path")
    named = config.model.config or config.model.path
    path = Path(named).expanduser()
    file = Path(config.model.path).expanduser()
    if is_single_file(config.model.path) and not file.is_file():
        yield ("model", "path"), f"no such file: {file}{nearest_beside(file)}"
    elif file.suffix == ".safetensors" and file.is_file() and (broken := file_problem(file) or scales_problem(file)):
        yield ("model", "path"), f"{file} {broken}"
    if path.is_file():
        text = "a pipeline is a folder, made by pipe.save_pretrained(folder), or one file (.safetensors, .gguf) with"
        text += " model.config"
        yield key, f"{path} is a file; {text}"
    elif path.is_dir():
        if not (path / "model_index.json").is_file():
            yield key, f"{path} {_no_pipeline(path)}"
        elif not read_json(path / "model_index.json"):
            yield key, f"{path / 'model_index.json'} is not a JSON object"
        else:
            yield from ((key, f"{path}: {text}") for text in folder_problems(config.model, path))
    elif looks_local(named):
        yield key, f"no such folder: {path}{nearest_folder(path)}"
    try:
        folder = model_folder(config)
    except ValueError as error:
        yield key, f"{named!r} is neither a folder nor a hub id (org/name): {error}"
        return
    if folder is None and not looks_local(named):
        notes.append(f"model.{key[-1]}: {named} is not on this machine yet; training downloads it")
    if folder is not None:
        yield from _pipeline(config, lambda file: read_json(folder / file))
        yield from _layers(config, folder)
        yield from _scheduler(config, _scheduler_settings(config, folder), notes)


def pipeline_class(model: Model) -> Any:
    """The class of one's own that loads the pipeline. Raises ValueError where there is none."""
    pipeline = find(str(model.pipeline), Group("pipeline", {}, "genrl.pipelines"))
    if not hasattr(pipeline, "from_pretrained"):
        raise ValueError(f"{model.pipeline} is no pipeline: derive a class from one of diffusers'")
    return pipeline


def folder_problems(model: Model, folder: Path) -> list[str]:
    """Why the components of a pipeline's folder cannot be loaded as the configuration has it."""
    index = read_json(folder / "model_index.json")
    wrong = [f"model.without names {name}, which it has not" for name in model.without if name not in index]
    wrong += [
        f"model.without names {name}, which nothing can go without"
        for name in model.without
        if name in (*DENOISERS, "vae", "scheduler")
    ]
    problems = pipeline_problems(
        folder,
        model.variant,
        pickled=not model.use_safetensors,
        left_out=model.without,
        loose=model.config is not None,
    )
    return wrong + [text for _, text in problems]


def _given_pipeline(config: Config, notes: list[str]) -> Iterator[FileFinding]:
    """A loaded pipeline of a script: what it cannot be asked for any more."""
    try:
        pipe = given(config.model.path)
    except ValueError as error:
        yield ("model", "path"), str(error)
        return
    model, loaded = config.model, "the pipeline is loaded already"
    for key in ("pipeline", "revision", "variant", "config", "quantize"):
        if getattr(model, key) is not None:
            yield ("model", key), f"{loaded}; leave it out, and load the pipeline so"
    if model.without:
        yield ("model", "without"), f"{loaded}; set these components of it to None"
    if model.encodings is not None:
        text = f"{loaded}, and may not be what the folder's encodings were made by; leave it out"
        yield ("model", "encodings"), text
    if model.offload.text_encoders == "encode_then_free":
        text = f"{loaded}, its text encoders too; write between, or give its hub id or folder"
        yield ("model", "offload", "text_encoders"), text
    if config.engine is not None:
        text = "Ray's workers load the pipeline themselves; give its hub id or folder as the model"
        yield ("engine",), text
    read = partial(_settings_in_memory, pipe)
    if not read("model_index.json"):
        problem = f"found an object of type {type(pipe).__name__}, not a diffusers pipeline"
        yield ("model", "path"), f"{problem}; load one by DiffusionPipeline.from_pretrained"
        return
    adapted = [name for name, part in pipe.components.items() if getattr(part, "peft_config", None)]
    if adapted and model.lora is not None:
        text = f"the {adapted[0]} has a LoRA on it already: call pipe.unload_lora_weights() first, and go on with it by"
        yield ("model", "lora"), f"{text} lora={{'from': FOLDER}}, or merge it by pipe.fuse_lora() before"
    yield from _pipeline(config, read)
    yield from _scheduler(config, read("scheduler/scheduler_config.json") | model.scheduler, notes)


def _settings_in_memory(pipe: Any, file: str) -> dict[str, Any]:
    """What a file of settings would hold if the pipeline were saved; empty where it would write none."""
    component, _, _ = file.rpartition("/")
    config = getattr(pipe.components.get(component) if component else pipe, "config", None)
    if not isinstance(config, Mapping):
        return {}
    # A part that was made in Python, not loaded, has no class in its settings.
    part = pipe.components.get(component) if component else pipe
    return {"_class_name": type(part).__name__, **config}


def _layers(config: Config, folder: Path) -> Iterator[FileFinding]:
    """What the names and shapes of the weights tell, whose files are opened only where a setting asks for it."""
    lora = None if is_single_file(config.model.path) else config.model.lora
    names_layers = lora is not None and bool(lora.targets or lora.ranks)
    if not names_layers and config.distributed.context == 1:
        return
    components = read_components(folder, config.model.variant, config.model.without)
    if lora is not None:
        problems = layer_problems(lora, components)
        yield from ((tuple(name.split(".", 3)), text) for name, text in problems)
    yield from ((("distributed", "context"), text) for text in context_problems(config, components))


def _pipeline(config: Config, read: Callable[[str], Mapping[str, Any]]) -> Iterator[FileFinding]:
    """What the classes of a pipeline and its networks' configurations tell. read: of a file of settings."""
    index = read("model_index.json")
    if config.model.pipeline is not None:  # of which loading tells alone
        index = {**index, "_class_name": config.model.pipeline.rpartition(":")[2]}
    networks = {name: str(index[name][1]) for name in DENOISERS if isinstance(index.get(name), list | tuple)}
    for key, text in problems(str(index.get("_class_name", "")), networks, lora=config.model.lora is not None):
        yield tuple(key.split(".")), text
    if problem := experts_problem(config, len(networks)):
        yield tuple(config.sharded_by.split(".")), problem
    is_flow = is_flow_scheduler({**read("scheduler/scheduler_config.json"), **config.model.scheduler})
    loop = loop_problems(
        str(index.get("_class_name", "")), is_flow=is_flow, branches=config.trainer.branches is not None
    )
    yield from ((tuple(key.split(".")), text) for key, text in loop)
    if "_class_name" in index and not networks:
        text = f"{index['_class_name']} has no denoiser: none of its components is called {', '.join(DENOISERS)}"
        yield ("model", "path"), text
    wrong = missing_components(config.model, index)
    yield from ((tuple(key.split(".")), text) for key, text in wrong)
    if cut := strength_problem(str(index.get("_class_name", "")), config.sampling.pipeline_args):
        yield ("sampling", "pipeline_args", "strength"), cut
    settings = [read(f"{name}/config.json") for name in (*networks, "vae")]
    vae = index["vae"][1] if isinstance(index.get("vae"), list) else ""
    for key, text in vae_problems(vae, settings[-1], config.model, config.sampling):
        yield tuple(key.split(".")), text
    step = side_step(settings[0], settings[-1]) if networks else None
    sides: list[tuple[KeyPath, int | None]] = [
        (("sampling", name), getattr(config.sampling, name)) for name in ("height", "width")
    ]
    if config.sampling.buckets != "rows":
        sides += [
            (("sampling", "buckets", k), n) for k, bucket in enumerate(config.sampling.buckets) for n in bucket[:2]
        ]
    for at, side in sides:
        if step and side is not None and side % step:
            fits = max(1, round(side / step)) * step
            yield at, f"this pipeline draws sides that are multiples of {step}; write {fits} for {side}"


def _adapters(config: Config, notes: list[str]) -> Iterator[FileFinding]:
    """The LoRAs that training begins with, and the frozen ones."""
    lora = config.model.lora
    if lora is None:
        return
    named: dict[KeyPath, str] = {} if lora.begin is None else {("model", "lora", "from"): lora.begin}
    named |= {("model", "lora", "frozen", number): source for number, source in enumerate(lora.frozen)}
    yield from lora_problems(named, notes)


def lora_problems(named: Mapping[KeyPath, str], notes: list[str]) -> Iterator[FileFinding]:
    """LoRAs by key that are not there, or are none."""
    for key, source in named.items():
        folder = Path(source).expanduser()
        if folder.exists() and not (folder.is_file() or any(folder.glob("*.safetensors"))):
            yield key, f"{folder} holds no LoRA: there is no .safetensors file in it"
        elif not folder.exists() and looks_local(hub_file(source)[0]):
            yield key, f"no such folder: {folder}{nearest_folder(folder)}"
        elif not folder.exists():
            notes.append(f"{dotted(key)}: {source} is not on this machine; training downloads it")


def _scheduler(config: Config, scheduler: Mapping[str, Any], notes: list[str]) -> Iterator[FileFinding]:
    if not scheduler:
        return
    name = scheduler.get("_class_name", "?")
    if "_class_name" in scheduler and (refusal := scheduler_refusal(str(name), scheduler)):
        yield ("model", "path"), refusal
        return
    if remark := replaced_schedule(str(name), scheduler):
        notes.append(f"model.path: {remark}")
    is_flow = is_flow_scheduler(scheduler)
    for key, text in scheduler_problems(str(name), config.model.scheduler, is_flow=is_flow):
        yield ("model", "scheduler", key), text
    if misfit := config.trainer.misfit(str(name), is_flow):
        keys, text = misfit
        yield tuple(keys[0].split(".")), text


def _scheduler_settings(config: Config, folder: Path) -> Mapping[str, Any]:
    """Settings that it is trained with; empty where the folder has none."""
    held = read_json(folder / "scheduler" / "scheduler_config.json")
    return held | config.model.scheduler if held else held


def _prompts_and_rewards(config: Config, notes: list[str]) -> Iterator[FileFinding]:
    sources: dict[str, PromptRows] = {}
    for name, source in (("train", config.prompts.train), ("eval", config.prompts.eval)):
        if source is None:
            continue
        if is_data_set(source):
            notes.append(f"prompts.{name}: {source} is a data set; it is read when training starts")
            continue
        try:
            sources[name] = read_prompts(source, config.prompts.column)
            notes += [f"prompts.{name}: {text}" for text in unread(sources[name].column_names)]
            yield from _buckets(config, name, sources[name], notes)
        except PromptError as error:
            yield ("prompts", name), str(error)
            continue
        skipped = sources[name].skipped
        notes += [f"prompts.{name}: skipped {row}" for row in skipped[:10]]
        notes += [f"prompts.{name}: {len(skipped)} rows skipped in all"] if len(skipped) > 10 else []
    texts = [source for source in (config.prompts.train, config.prompts.eval) if source is not None]
    if config.prompts.column != "prompt" and all(Path(source).suffix == ".txt" for source in texts):
        text = "a .txt file has one prompt per line and no columns; remove column, or name a .jsonl file or a data set"
        yield ("prompts", "column"), text
    wrong = config.trainer.file_problems(config, sources.get("train"), notes)
    yield from wrong
    for argument, column in config.sampling.inputs.items():
        for _, text in _missing(f"sampling.inputs.{argument}", [column], sources):
            yield ("sampling", "inputs", argument), text
    if len(sources) == 2:
        yield from _overlap(sources["train"], sources["eval"], notes)
    for index, reward in enumerate(config.rewards):
        yield from _unread(index, reward, sources, notes)
        if reward.remote is not None:
            servers = reward.remote if isinstance(reward.remote, str) else ", ".join(reward.remote)
            notes.append(f"rewards.{index}.remote: {servers} is asked when training starts")
        elif isinstance(reward.isolate, str):  # what is installed there is not known here
            from genrl_rewards.service.isolation import python_of  # which brings the network's client

            try:
                python_of(reward.isolate)
            except ValueError as error:
                yield ("rewards", index, "isolate"), str(error)
        else:
            yield from _reward(config, index, sources, notes)


def _buckets(config: Config, name: str, prompts: PromptRows, notes: list[str]) -> Iterator[FileFinding]:
    """Check `sampling.buckets`: the sizes of these rows, and whether there are enough of each to train on."""
    sampling = config.sampling
    if not sampling.buckets:
        if written := [column for column in NAMES if column in prompts.column_names]:
            text = f"the column {written[0]} is not read; sampling.buckets: rows samples each prompt in its own size"
            notes.append(f"prompts.{name}: {text}")
        return
    rows = sized(prompts.rows, sampling.buckets, sampling.picture_column, str(getattr(config.prompts, name)))
    arguments = sampling.prompts_together, sampling.buckets, sampling.picture_column
    if name == "train" and (problem := short_bucket(rows, *arguments)):
        yield ("sampling", "buckets"), problem


def _reward(config: Config, index: int, sources: Mapping[str, PromptRows], notes: list[str]) -> Iterator[FileFinding]:
    """A reward that is loaded here: where it is, its gradients, its columns in the prompts that were found."""
    key: KeyPath = ("rewards", index, "name")
    reward = config.rewards[index]
    try:
        origin = genrl_rewards.resolve(reward.name)
    except ValueError as error:
        yield key, str(error)
        return
    if (
        config.trainer.rewards_are == "differentiated"
        and reward.weight != 0
        and genrl_rewards.declaration(origin).gradients is False
    ):
        text = f"{config.trainer.algorithm} differentiates the reward, and {reward.name} has no gradients (it does not "
        text += (
            "say `differentiable = True`); train on clipscore, pickscore, aesthetic, hpsv2 or imagereward and give it"
        )
        yield key, f"{text} weight 0, or use flow_grpo or diffusion_nft, which need none"
    if origin.kind == "object" and (reward.isolate or (config.engine is not None and config.engine.reward_workers)):
        text = "was made in this process and cannot be sent to another; put it into a file, and name file.py:name"
        yield key, f"{reward.name} {text}"
    yield from ((("rewards", index, "args", name), text) for name, text in arguments_problems(reward.args))
    if origin.kind == "file":
        notes.append(f"rewards.{index}.name: training runs the code of {origin.where}")
        if wrong := genrl_rewards.misfit(Path(origin.where), origin.attribute, reward.args, everything=False):
            yield key, f"{reward.name}: {wrong}"
    yield from _missing(f"reward {reward.name}", declared_columns(origin), sources)


def _missing(asker: str, columns: Sequence[str], sources: Mapping[str, PromptRows]) -> Iterator[FileFinding]:
    """Name, for each source, the columns that somebody reads and not every row has."""
    for name, rows in sources.items():
        missing = [column for column in columns if column not in rows.column_names]
        if missing:
            have = ", ".join(rows.column_names) or "none beside the prompt"
            hint = "".join(nearest(c, [*rows.column_names, *FROM_SAMPLER]) for c in missing)
            asks = f"{asker} asks for the column {', '.join(missing)}"
            yield ("prompts", name), f"{asks}; columns of every row: {have}.{hint}"


def _unread(index: int, reward: Reward, sources: Mapping[str, PromptRows], notes: list[str]) -> Iterator[FileFinding]:
    """A column of the prompts that a reward of ours would read, if an argument named it."""
    built_in = BUILT_IN.get(reward.name)
    if built_in is None or not built_in.column or built_in.column in reward.args:
        return
    if not any(built_in.column in rows.column_names for rows in sources.values()):
        return
    says, column = f"the prompts have a column {built_in.column}", built_in.column
    if reward.remote is None:
        text = f"{says}, which {reward.name} ignores; write args: {{{column}: {column}}}"
        yield ("rewards", index, "args"), text
    else:
        served = f"{reward.name} reads it where it is served with --arg {column}={column}"
        notes.append(f"rewards.{index}.remote: {says}; {served}")


def _overlap(train: PromptRows, held_out: PromptRows, notes: list[str]) -> Iterator[FileFinding]:
    trained = {row.text for row in train.rows}
    shared = sum(row.text in trained for row in held_out.rows)
    if shared == len(held_out.rows):
        yield ("prompts", "eval"), "every one of these prompts is trained on; hold some out"
    elif shared:
        notes.append(f"prompts.eval: {shared} of {len(held_out.rows)} prompts are trained on too")


def declared_columns(origin: genrl_rewards.Origin) -> tuple[str, ...]:
    """Metadata columns that a reward asks for, read from its source text; () where that cannot tell."""
    return genrl_rewards.declaration(origin).columns


def _no_pipeline(folder: Path) -> str:
    """Why a folder without model_index.json cannot be trained."""
    if (folder / "modular_model_index.json").is_file():
        text = "is a ModularPipeline, which is run in blocks: there is no one call of it that training could replay"
        return f"{text}; give the same model as a DiffusionPipeline, a folder or hub id with a model_index.json"
    return "has no model_index.json, so it is not a saved diffusers pipeline"
