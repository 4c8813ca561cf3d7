"""Checks of a vision-language model's run against the disk: model folder, data, rewards. No weights, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import genrl_rewards
from genrl.config.folders import (
    PROCESSORS,
    arguments_problems,
    looks_local,
    nearest_folder,
    no_transformers_model,
    tokenizer_problem,
    weights_problem,
)
from genrl.config.plugins import find
from genrl.config.run_config import FileFinding
from genrl.config.sections import missing_quantizer
from genrl.config.yaml_source import KeyPath
from genrl.data.prompts import PromptError, PromptRows
from genrl.data.prompts import read as read_prompts
from genrl.vlm.config.names import FORMATS, OUTPUTS, SHAPE_FILES, TASKS
from genrl.vlm.config.schema import VLMConfig, columns_of
from genrl.vlm.config.sections import Synthesis, Task
from genrl_rewards.contract import nearest
from genrl_rewards.extras import install
from genrl_rewards.given import given, is_given
from genrl_rewards.scorers.texts.completions import GIVEN, resolve_text

PROCESSED = {"text": "image processor", "image": "image processor", "music": "processor", "music_reward": "processor"}
CODEC = "codec.safetensors"
GENERATED = ("answer", "question", "level")
"""Columns of the generated tasks; some have more."""
FURTHER = {
    "box": ("box",),
    "point": ("box",),
    "key_frames": ("frames", "about", "truth"),
    "scenes": ("caption",),
    "quality": ("harm",),
    "pairs": ("first", "second"),
}


def file_problems(config: VLMConfig, notes: list[str]) -> Iterator[FileFinding]:
    """What is wrong, each with its key; remarks that stop nothing go to `notes`."""
    yield from _model(config, notes)
    if (vllm := config.generation.vllm) is not None and vllm.url is None and find_spec("vllm") is None:
        text = f"vLLM is not installed: {install('vllm')}, or name a server by generation.vllm.url"
        yield ("generation", "vllm"), text
    if config.vlm.kernels == "liger" and find_spec("liger_kernel") is None:
        yield ("vlm", "kernels"), "Liger is not installed: pip install liger-kernel, or write null"
    if config.vlm.quantize is not None and (lacking := missing_quantizer(config.vlm.quantize)):
        yield ("vlm", "quantize"), lacking
    yield from _task(config, notes)
    for number, stage in enumerate(config.stages):
        if stage.task:
            part = config.parts[number]
            if part.trainer.learns_from == "data":  # its answers are given, no reward sees them
                part = part.model_copy(update={"rewards": ()})
            yield from ((("stages", number, *key), text) for key, text in _task(part, notes) if key[0] == "task")
    if config.synthesis is not None:
        yield from _synthesis(config.synthesis)


def _task(config: VLMConfig, notes: list[str]) -> Iterator[FileFinding]:
    columns: list[tuple[str, list[str]]] = []
    if config.task.format is not None and config.task.format not in FORMATS.built_in:
        try:
            find(config.task.format, FORMATS)
        except ValueError as error:
            yield ("task", "format"), str(error)
        if ".py" in config.task.format:
            notes.append(f"task.format: training runs the code of {config.task.format}")
    if config.task.name:
        try:
            columns.append(("name", [*GENERATED, *_further(config.task.name, notes)]))
        except ValueError as error:
            yield ("task", "name"), str(error)
    for name, source in (("train", config.task.train), ("eval", config.task.eval)):
        if source is None:
            continue
        if config.task.format is not None:
            notes.append(f"task.{name}: rows of {source} are read by task.format when training starts")
        elif is_given(source):
            try:
                columns.append((name, columns_of_rows(given(source), config.task)))
            except ValueError as error:
                yield ("task", name), str(error)
        elif Path(source).suffix == ".jsonl" or (Path(source).suffix == ".txt" and config.vlm.makes):
            try:
                parsed = read_prompts(source, config.task.prompt, chat=True)
            except PromptError as error:
                yield ("task", name), str(error)
                continue
            notes += [f"task.{name}: skipped {row}" for row in parsed.skipped[:10]]
            columns.append((name, parsed.column_names))
            if not config.vlm.makes and config.task.image is not None:
                yield from _images(config, name, source, parsed)
        elif ":" in source:
            notes.append(f"task.{name}: {source} is a data set; it is read when training starts")
        else:
            yield ("task", name), f"{source}: questions are a .jsonl file, or a data set as id:split"
    yield from _rewards(config, columns, notes)
    yield from _read_columns(config, columns)


def _read_columns(config: VLMConfig, columns: Sequence[tuple[str, list[str]]]) -> Iterator[FileFinding]:
    """Columns that method, rescue and augmentation read and that the rows lack. columns: of each source of rows, which
    is named by its key of `task`."""
    column = config.trainer.recipe(config).advantage.task if "task" in config.trainer.reads else ""
    for name, names in columns if column else ():
        if column not in names and name in ("name", "train"):
            asks = f"{config.trainer.name} compares the answers of a task, which the column {column} is to name"
            yield ("task", name), f"{asks}; columns of every row: {', '.join(names)}.{nearest(column, names)}"
    key, target = config.trainer.demonstrations or ("", "")
    needed = columns_of(target) if target else []
    for name, names in columns:
        missing = [column for column in needed if column not in names]
        if missing and name == "name":  # data may have its answers in messages
            asks = f"{key} asks for the column {missing[0]}; columns of every row: {', '.join(names)}"
            yield ("task", name), f"{asks}.{nearest(missing[0], names)}"
    rescue = config.rescue
    for column in () if rescue is None else filter(None, (*rescue.hints, rescue.demonstration)):
        for name, names in columns:
            if column not in names and name != "eval":
                text = f"rescue reads the column {column}; columns of every row: {', '.join(names)}"
                yield ("task", name), f"{text}.{nearest(column, names)}"
    for name, names in columns if config.augmentation is not None else ():
        if "answer" not in names:
            asks = "augmentation tells hard questions their answer, from the column answer"
            yield ("task", name), f"{asks}; columns of every row: {', '.join(names)}.{nearest('answer', names)}"


def _further(task: str, notes: list[str]) -> tuple[str, ...]:
    """Columns of a task's rows beside those of every task. Raises ValueError for one that gives no questions."""
    if task in TASKS.built_in:
        return FURTHER.get(task, ())
    from numpy.random import default_rng

    task_made = find(task, TASKS)
    if ".py" in task:
        notes.append(f"task.name: training runs the code of {task}")
    try:
        first_row = task_made("train")[0] if isinstance(task_made, type) else task_made(default_rng(0), "train")
    except Exception as error:  # a user's code
        text = f"{task} gives no question: {type(error).__name__}: {error}; see genrl/vlm/tasks.py"
        raise ValueError(text) from error
    if not isinstance(first_row, tuple) or len(first_row) not in (3, 4):
        raise ValueError(f"{task} gives no question but a {type(first_row).__name__}; see genrl/vlm/tasks.py")
    return tuple(first_row[3]) if len(first_row) == 4 else ()


def _synthesis(settings: Synthesis) -> Iterator[FileFinding]:
    try:
        resolve_text(settings.check)
    except ValueError as error:
        yield ("synthesis", "check"), str(error)
    if looks_local(settings.pipeline) and not (Path(settings.pipeline) / "model_index.json").is_file():
        text = f"{settings.pipeline} is no folder of a diffusers pipeline (model_index.json); a hub id is org/name"
        yield ("synthesis", "pipeline"), text


def _model(config: VLMConfig, notes: list[str]) -> Iterator[FileFinding]:
    key: KeyPath = ("vlm", "path")
    yield from _codec(config, notes)
    if config.vlm.output not in OUTPUTS.built_in:  # it says itself what it reads from the path
        notes.append(f"vlm.output: training runs the code of {config.vlm.output}")
        try:
            find(config.vlm.output, OUTPUTS)
        except ValueError as error:
            yield ("vlm", "output"), str(error)
        return
    if is_given(config.vlm.path):
        yield from _given_model(config)
        return
    path = Path(config.vlm.path).expanduser()
    if wrong := no_transformers_model("vlm.path", config.vlm.path, notes):
        yield key, wrong
    elif not path.is_dir():
        return
    elif config.vlm.makes in ("voxels", "audio") and config.vlm.codec is None and not (path / CODEC).is_file():
        yield key, f"{path} has no {CODEC}, by which codes are decoded; docs/sequence_policies.md says what is in it"
    elif config.vlm.output in PROCESSED and not any((path / name).is_file() for name in PROCESSORS):
        text = f"{path} has no {PROCESSED[config.vlm.output]} ({' or '.join(PROCESSORS)})"
        yield key, f"{text}; save the processor of the original model there"
    elif not (path / "tokenizer_config.json").is_file():
        yield key, f"{path} has no tokenizer_config.json; save the tokenizer beside the model"
    elif wrong := weights_problem(path) or tokenizer_problem(path):
        yield key, f"{path} {wrong}"


def _codec(config: VLMConfig, notes: list[str]) -> Iterator[FileFinding]:
    if config.vlm.codec is None:
        return
    key, path = ("vlm", "codec"), Path(config.vlm.codec).expanduser()
    if path.is_dir() and not any((path / name).is_file() for name in SHAPE_FILES):
        yield key, f"{path} has no {' or '.join(SHAPE_FILES)}"
    elif not path.exists() and looks_local(config.vlm.codec):
        yield key, f"no such file or folder: {path}{nearest_folder(path)}"
    elif not path.exists():
        notes.append(f"vlm.codec: {config.vlm.codec} is loaded from the hub when training starts")


def _given_model(config: VLMConfig) -> Iterator[FileFinding]:
    """A loaded model of a script: what it cannot be asked for any more."""
    key: KeyPath = ("vlm", "path")
    try:
        model = given(config.vlm.path)
    except ValueError as error:
        yield key, str(error)
        return
    if config.vlm.output != "text":
        yield key, f"a model that makes {config.vlm.output} is loaded here; give its hub id or folder"
    if config.generation.vllm is not None:
        yield ("generation", "vllm"), "vLLM loads the model itself; give its hub id or folder"
    if config.vlm.quantize is not None:
        yield (
            ("vlm", "quantize"),
            "weights are quantised while they are loaded; give the hub id or folder",
        )
    if getattr(model.processor, "image_processor", None) is None:
        text = f"needs its processor with an image processor, found a {type(model.processor).__name__}"
        yield key, f"{text}; give processor=AutoProcessor.from_pretrained(...)"


def columns_of_rows(rows: Any, task: Task) -> list[str]:
    """The columns of every row that a script hands over, a `datasets.Dataset` or a list of mappings, beside the
    question. Raises ValueError where one lacks its question or its picture, with its number."""
    if hasattr(rows, "column_names"):
        names = list(rows.column_names)
    else:
        wrong = [k for k, row in enumerate(rows) if not isinstance(row, Mapping)]
        if wrong:
            kind = type(rows[wrong[0]]).__name__
            raise ValueError(f"row {wrong[0]}: a question is a mapping with its columns, found a {kind}")
        names = [name for name in (rows[0] if len(rows) else ()) if all(name in row for row in rows)]
    for column, key in ((task.prompt, "prompt"), (task.image, "image")):
        if column is not None and column not in names:
            have = ", ".join(names) or "none"
            text = f"not every row has the column {column!r} (task.{key} names it)"
            raise ValueError(f"{text}; columns of every row: {have}.{nearest(column, names)}")
    return [name for name in names if name != task.prompt]


def _images(config: VLMConfig, name: str, source: str, prompts: PromptRows) -> Iterator[FileFinding]:
    column = str(config.task.image)
    without = next((row for row in prompts.rows if column not in row.columns), None)
    if without is not None:
        close = get_close_matches(column, prompts.column_names, n=1, cutoff=0.5)
        have = ", ".join(prompts.column_names) or "none beside the question"
        hint = f"; did you mean {close[0]!r}?" if close else ""
        text = f"{source}:{without.line}: no picture in the column {column!r}; columns of every row: {have}{hint}"
        yield ("task", name), f"{text} (task.image names the column)"
        return
    for row in prompts.rows:
        images = row.columns[column] or []
        for image in images if isinstance(images, list) else [images]:
            if not (Path(source).parent / str(image)).is_file():
                yield ("task", name), f"{source}:{row.line}: there is no file {image!r} beside the data"
                return


def _rewards(config: VLMConfig, columns: list[tuple[str, list[str]]], notes: list[str]) -> Iterator[FileFinding]:
    for index, reward in enumerate(config.rewards):
        try:
            origin = resolve_text(reward.name)
        except ValueError as error:
            yield ("rewards", index, "name"), str(error)
            continue
        yield from ((("rewards", index, "args", name), text) for name, text in arguments_problems(reward.args))
        if origin.kind == "file":
            notes.append(f"rewards.{index}.name: training runs the code of {origin.where}")
            if wrong := genrl_rewards.misfit(Path(origin.where), origin.attribute, reward.args, everything=True):
                yield ("rewards", index, "name"), f"{reward.name}: {wrong}"
        if config.vlm.output not in OUTPUTS.built_in:
            continue  # what it makes is known when training starts
        declared = genrl_rewards.declaration(origin)
        pictures = [name for name in declared.takes if name in ("images", "pil_images", "pairs")]
        if config.vlm.makes in ("image", "voxels"):
            if not pictures:
                yield (
                    ("rewards", index, "name"),
                    f"{reward.name} scores no pictures, and this model makes them; write shapes",
                )
                continue
        elif pictures:
            text = f"{reward.name} scores {pictures[0]} of a sampler; here completions are scored"
            yield ("rewards", index, "name"), f"{text}; write exact, numeric, choice or a function of your own"
            continue
        for name, names in columns:
            made_columns = ("audio", "rate") if config.vlm.makes in ("audio", "music") else ()
            missing = [c for c in declared.columns if c not in names and c not in (*GIVEN, *made_columns)]
            if missing:
                asks = (
                    f"reward {reward.name} asks for the column {missing[0]}; columns of every row: {', '.join(names)}"
                )
                yield ("task", name), f"{asks}.{nearest(missing[0], names)}"
