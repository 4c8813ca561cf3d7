"""`genrl compare`: samples of two pipelines for the same prompts and noise, on a page where people judge them blind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrl.config.folders import read_json
from genrl.data.prompts import Prompt
from genrl.diffusion.chosen import Chosen, adapter_of, choose, config_of
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.diffusion.policy.loading import check_call_arguments
from genrl.diffusion.rollout.rollout import batch_inputs, to_bytes
from genrl.diffusion.rollout.scoring import Scorers, check_rows, score
from genrl.diffusion.sample import load, samples
from genrl.playground.shapes import kind_of
from genrl.runtime.show.compare.page import Media, Page, Pair, check_size, encode
from genrl.runtime.weights.devices import default_device, empty_cache

INDEX = "model_index.json"
NEWEST: Mapping[str, int] = MappingProxyType({})
TOGETHER = 64
"""Pairs that are scored together, for rewards that look at groups: the two samples of a pair are one."""


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    name: str
    """As the user wrote it."""
    chosen: Chosen
    run: Config | None = None
    """The configuration of the run that trained it."""

    def described(self) -> dict[str, Any]:
        """What the key of the page says of it."""
        model, adapter, arguments, _ = self.chosen
        return {"name": self.name, "model": model.path, "lora": adapter, "arguments": arguments}


def sides(
    a: str, b: str, base: str | None, dtype: str | None, given: Mapping[str, Any], steps: Mapping[str, int] = NEWEST
) -> tuple[Side, Side]:
    """The two models: run folders, LoRA folders or files, pipelines. A LoRA is put onto `base`, or else the other
    model or its run's; what is no run is called as the other one's evaluations are.
    given: arguments of both calls. steps: of a run by its name, the checkpoint; without, the newest.

    Raises ValueError for models that are not there or cannot be compared: of other pipelines, or one and the same.
    """
    first, second = _side(a, b, base, dtype, given, steps), _side(b, a, base, dtype, given, steps)
    kinds = [_index(side.chosen.model).get("_class_name") for side in (first, second)]
    if kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        raise ValueError(
            f"A is a {kinds[0]}, B a {kinds[1]}: the same noise means nothing to two kinds of pipelines. "
            "Compare models of one kind"
        )
    sizes = [_size(side.chosen) for side in (first, second)]
    if sizes[0] and sizes[1] and sizes[0] != sizes[1]:
        raise ValueError(
            f"A makes latents of size {sizes[0]}, B of {sizes[1]}: everybody would see which is which, and they have "
            "not the same noise. Give --height and --width"
        )
    if _identity(first.chosen) == _identity(second.chosen):
        raise ValueError(f"A and B are the same model, {a}: give a run, a LoRA or a model that differs from it")
    return first, second


def _side(
    name: str, other: str, base: str | None, dtype: str | None, given: Mapping[str, Any], steps: Mapping[str, int]
) -> Side:
    if not is_lora(name) and (run := config_of(name)) is not None:
        adapter = adapter_of(Path(name), steps[name]) if name in steps else None
        return Side(name, choose(name, adapter, dtype, given), run)
    under = base or (None if is_lora(other) else other)
    if is_lora(name):
        if under is None:
            raise ValueError(f"{name} is a LoRA, and so is {other}: say on which model, --model FOLDER or hub id")
        return Side(name, choose(under, name, dtype, given))
    if under is None or config_of(under) is None:
        return Side(name, choose(name, None, dtype, given))
    like = choose(under, None, dtype, given)  # called as the run's evaluations are
    same = Path(name).resolve() == Path(like.model.path).resolve() or name == like.model.path
    model = like.model if same else Model.model_validate({"path": name, "dtype": like.model.dtype})
    return Side(name, like._replace(model=model, adapter=None))


def is_lora(name: str) -> bool:
    """Whether a path is a LoRA: a .safetensors file, or a folder with some, whose tensors are those of an adapter."""
    path = Path(name)
    if path.is_dir() and ((path / "config.yaml").exists() or (path / INDEX).exists()):
        return False
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.suffix == ".safetensors" else []
    return any(".lora" in key or "lora_" in key or "lokr_" in key for file in files for key in _keys(file))


def _keys(file: Path) -> list[str]:
    if not file.is_file():
        return []
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"{file} is no .safetensors file, or is cut off: {error}") from error


def _index(model: Model) -> dict[str, Any]:
    """model_index.json of a pipeline's folder; empty where it has none here, or is on the hub."""
    return read_json(Path(model.path) / INDEX)


def _size(chosen: Chosen) -> Any:
    """The size of latents that a pipeline in a folder makes unless it is told another; None where it does not say."""
    if chosen.arguments.keys() & {"height", "width"}:
        return None
    parts = (read_json(Path(chosen.model.path) / name / "config.json") for name in ("transformer", "unet"))
    return next((part["sample_size"] for part in parts if part.get("sample_size")), None)


def _identity(chosen: Chosen) -> tuple[object, ...]:
    def resolved(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    model = chosen.model
    return (resolved(model.path), model.revision, model.dtype, resolved(chosen.adapter), chosen.arguments)


def category_of(row: Prompt, column: str | None) -> str | None:
    """What the results of a prompt are listed by: its column, else (None) the kind of scene of the embedded world."""
    return kind_of(row.text) if column is None else str(row.columns[column])


def compare(
    first: Side,
    second: Side,
    rows: Sequence[Prompt],
    page: Page,
    scorers: Sequence[Scorers] = (),
    *,
    seed: int = 0,
    per_prompt: int = 1,
    column: str | None = None,
    fps: int = 16,
    begin: Callable[[int], None] = lambda samples: None,
    advance: Callable[[int], None] = lambda samples: None,
) -> None:
    """Put a pair for every prompt, `per_prompt` of them, into the page; sample j of prompt k starts, for both, from
    `torch.Generator().manual_seed(seed + k * per_prompt + j)`, alone, in the prompt's own size where it has one.

    scorers: rewards that score both samples; a pair is a group for those that compare. column: of the category of a
    prompt. begin: told the number of samples; advance: how many more there are. Raises ValueError where the page would
    be too large, which is known after the first sample.
    """
    repeated = [row for row in rows for _ in range(per_prompt)]
    for labelled in scorers:
        check_rows(labelled.rewards, rows, "prompts")
    seeds = range(seed, seed + len(repeated))
    begin(2 * len(repeated))
    with TemporaryDirectory(prefix="genrl-compare-") as folder:
        # One model's samples wait on disk until those of the other are there: both need not fit into memory together.
        for k, (sample, rate) in enumerate(_made(first, repeated, seeds)):
            if k == 0:
                check_size(encode(sample, fps=fps, rate=rate), len(repeated), beside=page.beside)
            save_file({"sample": _whole(sample)}, Path(folder) / f"{k}.safetensors")
            advance(1)
        waiting: list[tuple[str, Prompt, Tensor]] = []
        for k, (sample, rate) in enumerate(_made(second, repeated, seeds)):
            pair = [_shown(load_file(Path(folder) / f"{k}.safetensors")["sample"]), _shown(_whole(sample))]
            a, b = (encode(picture, fps=fps, rate=rate) for picture in pair)
            token = page.add(
                Pair(repeated[k].text, a, b, category_of(repeated[k], column), _source(first, repeated[k]))
            )
            if token is not None and scorers:
                waiting.append((token, repeated[k], torch.stack(pair)))
            if len(waiting) == TOGETHER:
                _score(scorers, waiting, page)
                waiting = []
            advance(1)
        _score(scorers, waiting, page)


def _made(side: Side, rows: Sequence[Prompt], seeds: Sequence[int]) -> Iterator[tuple[Tensor, int | None]]:
    """The samples of one model, which is in memory only meanwhile, and the rate of those that are sounds."""
    pipe = load(side.chosen.model, side.chosen.adapter)
    texts, sizes = [row.text for row in rows], [row.size for row in rows]
    names = [*side.chosen.arguments, *side.chosen.inputs, *(name for size in sizes for name in size)]
    check_call_arguments(pipe, names, section=None)
    inputs = batch_inputs(side.chosen.inputs, rows)
    rate = _rate(pipe)
    for sample in samples(pipe, texts, seeds, side.chosen.arguments, inputs, sizes):
        yield sample, rate
    del pipe
    empty_cache(torch.device(default_device()))


def _rate(pipe: Pipeline) -> int | None:
    """Samples per second of a pipeline that makes sounds, as its autoencoder says."""
    config = getattr(pipe.components.get("vae"), "config", {})
    rate = config.get("sampling_rate")
    return None if rate is None else int(rate)


def _whole(sample: Tensor) -> Tensor:
    """Pictures as the 8 bits that people see and rewards score; sounds as they are."""
    return to_bytes(sample.float()) if sample.ndim > 2 else sample.float().contiguous()


def _shown(sample: Tensor) -> Tensor:
    return sample.float() / 255 if sample.dtype == torch.uint8 else sample


def _source(side: Side, row: Prompt) -> Media | None:
    """The picture that an editing model was given with this prompt, the first of them."""
    pictures = batch_inputs(side.chosen.inputs, [row])
    return encode(next(iter(pictures.values()))[0]) if pictures else None


def _score(scorers: Sequence[Scorers], pairs: Sequence[tuple[str, Prompt, Tensor]], page: Page) -> None:
    """Put the scores of pairs (token, prompt, both samples [2, ...]) into the key of the page."""
    rows = [row for _, row, _ in pairs for _ in range(2)]
    pieces = [([2 * k, 2 * k + 1], both) for k, (_, _, both) in enumerate(pairs)]
    labels: set[str] = set()
    for number, labelled in enumerate(scorers if pairs else ()):
        values = score(labelled, pieces, rows, [slot // 2 for slot in range(len(rows))]).values
        for label, scores in values.items():
            name = f"{label} ({'AB'[number]})" if label in labels else label
            numbers = [None if math.isnan(value) else value for value in scores.tolist()]
            for k, (token, _, _) in enumerate(pairs):
                page.add_scores(token, name, numbers[2 * k], numbers[2 * k + 1])
        labels |= values.keys()
