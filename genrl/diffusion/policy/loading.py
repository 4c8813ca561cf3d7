"""Loading a pipeline by the real loader of diffusers, and whether it can be called as configured."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers.utils import logging as transformers_logging

from genrl.diffusion.config.combinations import OURS
from genrl.diffusion.config.files import folder_problems, pipeline_class
from genrl.diffusion.config.model_rules import is_text_encoder, missing_components, missing_packages, quantized
from genrl.diffusion.config.pipeline_classes import is_flow_scheduler, scheduler_problems
from genrl.diffusion.config.sections import Model, Sampling
from genrl.diffusion.files.single_file import load_single_file
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.runtime.weights.low_rank import quantization_config
from genrl_rewards.given import is_given, take
from genrl_rewards.models.accounts import accounted


def load_pipeline(model: Model, *, text_encoders: bool = True) -> Pipeline:
    """The pipeline as diffusers loads it, from a folder, the hub or one file, or without its text encoders; ValueError
    naming the key where it cannot."""
    left_out = {}
    if not text_encoders:
        index = DiffusionPipeline.load_config(model.path, revision=model.revision)
        left_out = {name: None for name in index if is_text_encoder(name)}
    pipe = _load(model, left_out)
    if model.scheduler:
        kind, held = type(pipe.scheduler), pipe.scheduler.config
        is_flow = is_flow_scheduler({"_class_name": kind.__name__, **held, **model.scheduler})
        for key, text in scheduler_problems(kind.__name__, model.scheduler, is_flow=is_flow):
            raise ValueError(f"model.scheduler.{key}: {text}")
        try:
            pipe.scheduler = kind.from_config(held, **model.scheduler)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"model.scheduler: {kind.__name__} cannot be made of {model.scheduler}: {error}"
            ) from error
    return pipe


def load_components(model: Model, pipe: Pipeline, names: Sequence[str]) -> dict[str, nn.Module]:
    """Load those of a pipeline's networks which it was loaded without."""
    pipeline = _load(model, {name: part for name, part in pipe.components.items() if name not in names})
    return {name: part for name, part in pipeline.components.items() if name in names and part is not None}


def _load(model: Model, given: Mapping[str, Any]) -> Pipeline:
    """given: components that are not to be loaded."""
    if is_given(model.path):
        handed: Pipeline = take(model.path)
        return handed
    if not sys.stderr.isatty():  # bars are for people; in a log they are clutter
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
    folder = Path(model.config or model.path).expanduser()
    if folder.is_dir() and (wrong := folder_problems(model, folder)):
        raise ValueError(f"model.{'config' if model.config else 'path'}: {folder}: {'; '.join(wrong)}")
    given = dict.fromkeys(model.without) | dict(given)
    if model.config is not None:
        with accounted(f"model.path: {model.path!r} could not be loaded on model.config {model.config!r}"):
            return load_single_file(model)
    held = quantization(model)
    with accounted(f"model.path: {model.path!r} could not be loaded as a diffusers pipeline"):
        kind = DiffusionPipeline if model.pipeline is None else pipeline_class(model)
        pipe: Pipeline = kind.from_pretrained(
            model.path,
            revision=model.revision,
            variant=model.variant,
            use_safetensors=True if model.use_safetensors else None,
            dtype=getattr(torch, model.dtype),
            **({} if held is None else {"quantization_config": held}),
            **given,
        )
    return pipe


def check_call_arguments(pipe: Pipeline, arguments: Iterable[str], section: str | None = "sampling") -> None:
    """Raise ValueError where the pipeline's call does not take an argument, naming its key and the nearest it takes.

    arguments: names of all that is to be passed but what the trainer sets itself (prompt, generator, ...). section:
    that of the configuration they come from; `pipeline_args` holds those that are no key of their own. None: they come
    from no configuration.
    """
    kind = type(pipe)
    parameters = inspect.signature(kind.__call__).parameters
    # Nothing can be said of a call that takes whatever comes.
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    legal = sorted(parameters.keys() - {"self", *OURS})
    for name in arguments:
        if name in legal:
            continue
        is_key = name in Sampling.model_fields
        key = name if section is None else f"{section}.{name}" if is_key else f"{section}.pipeline_args.{name}"
        near = difflib.get_close_matches(name, legal, n=1)
        nearest = f"did you mean {near[0]}? " if near else ""
        remedy = "; set it to null" if is_key and section is not None else "; remove it"
        raise ValueError(f"{key}: {kind.__name__} takes no such argument{remedy}; {nearest}it takes {', '.join(legal)}")


# Weights held in fewer bits (`model.quantize`), as diffusers and transformers quantise them while they load.


def quantization(model: Model) -> PipelineQuantizationConfig | None:
    """What `DiffusionPipeline.from_pretrained` is to be told; None where nothing is quantised.

    Raises ValueError, naming the key, for a component that the pipeline lacks, a package that is not installed, or a
    device that cannot.
    """
    if model.quantize is None:
        return None
    for key, problem in missing_packages(model):
        raise ValueError(f"{key}: {problem}")
    # The index is a small file: what is wrong is said before gigabytes are read.
    index = DiffusionPipeline.load_config(model.path, revision=model.revision)
    for key, problem in missing_components(model, index):
        raise ValueError(f"{key}: {problem}")
    libraries = {name: entry[0] for name, entry in index.items() if isinstance(entry, (list, tuple)) and entry[0]}
    kinds = quantized(model, libraries)
    if "nf4" in kinds.values() and not (torch.cuda.is_available() or torch.xpu.is_available()):
        raise ValueError(
            "model.quantize: nf4 is computed by bitsandbytes, for which diffusers asks for a GPU, and there is none "
            "here; write int8 or fp8"
        )
    loaders = {name: transformers if libraries[name] == "transformers" else diffusers for name in kinds}
    dtype = getattr(torch, model.dtype)
    mapping = {name: quantization_config(kind, loaders[name], dtype) for name, kind in kinds.items()}
    return PipelineQuantizationConfig(quant_mapping=mapping)
