"""Loading a pipeline by the real loader of diffusers, from a folder, the hub or one file, and whether it can be called
as configured.

A .safetensors file that holds an autoencoder is a whole pipeline and read by its class; another one, as ComfyUI has
them, and a .gguf file are the denoiser alone. What a file lacks (text encoders, often) comes from the base pipeline of
`model.config`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, GGUFQuantizationConfig
from diffusers.loaders.single_file import FromSingleFileMixin
from diffusers.loaders.single_file_utils import (
    LDM_VAE_KEYS,
    SingleFileComponentError,
    is_clip_model_in_single_file,
    is_t5_in_single_file,
)
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.utils import logging as diffusers_logging
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from genrl.config.folders import file_problem, is_gguf, read_header, scales_problem
from genrl.diffusion.config.combinations import OURS
from genrl.diffusion.config.files import folder_problems, pipeline_class
from genrl.diffusion.config.model_rules import (
    DENOISERS,
    is_text_encoder,
    missing_components,
    missing_packages,
    quantized,
)
from genrl.diffusion.config.pipeline_classes import is_flow_scheduler, scheduler_problems
from genrl.diffusion.config.sections import Model, Sampling
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


logger = logging.getLogger(__name__)

OTHERS = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.", "model_ema.")
"""How the keys of what is no denoiser begin."""
DENOISER = "model.diffusion_model."
MOST_UNUSED = 0.005
"""Share of a denoiser's numbers that may be of no use, as buffers are and norms that nothing reads."""


@dataclass(frozen=True)
class _Parts:
    """How a file is read: `kind.from_single_file` with `besides` given (components of the base, by name and class), or
    where it is a denoiser alone, `networks` (its name and class) by theirs, and all else from the base."""

    kind: Any
    besides: dict[str, Any]
    networks: dict[str, Any]


def load_single_file(model: Model) -> Pipeline:
    """The pipeline of the file `model.path` on the base `model.config`. Raises ValueError, OSError or LookupError
    where diffusers reads no such file, or the file lacks weights that the base does not have."""
    if not is_gguf(model.path):
        path = Path(model.path).expanduser()
        if problem := file_problem(path) or scales_problem(path):
            raise ValueError(f"it {problem}")
    parts, dtype, base = _parts(model), getattr(torch, model.dtype), model.config
    held = {"quantization_config": GGUFQuantizationConfig(compute_dtype=dtype)} if is_gguf(model.path) else {}
    try:
        arguments = {
            name: kind.from_single_file(model.path, config=base, subfolder=name, torch_dtype=dtype, **held)
            for name, kind in parts.networks.items()
        }
        arguments |= {
            name: kind.from_pretrained(base, subfolder=name, dtype=dtype, use_safetensors=True)
            for name, kind in parts.besides.items()
        }
        pipe: Pipeline
        if parts.networks:
            pipe = DiffusionPipeline.from_pretrained(base, **arguments, dtype=dtype, use_safetensors=True)
        else:
            pipe = parts.kind.from_single_file(model.path, config=base, torch_dtype=dtype, **arguments)
    except SingleFileComponentError as error:  # no ValueError
        raise ValueError(str(error).splitlines()[0]) from error
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            lacking = [weight for weight, value in component.state_dict().items() if value.is_meta]
            if lacking:
                raise ValueError(f"it lacks {len(lacking)} weights of {name} ({', '.join(lacking[:3])}...)")
    if not is_gguf(model.path):
        _require_used(model, next(name for name in DENOISERS if pipe.components.get(name) is not None), pipe)
    return pipe


def _require_used(model: Model, name: str, pipe: Pipeline) -> None:
    """Raise ValueError where numbers of the file are in no layer of the denoiser: diffusers' converters take what they
    know, and leave out the rest of a larger model without a word. They rename, split and join, so numbers are counted.
    """
    sizes = {key: math.prod(shape) for key, shape, _ in read_header(Path(model.path).expanduser())}
    prefixed = {key for key in sizes if key.startswith(DENOISER)}
    held = sum(sizes[key] for key in prefixed or sizes if not key.startswith(OTHERS))
    left = held - sum(value.numel() for value in pipe.components[name].state_dict().values())
    text = f"{left:,} of the {held:,} numbers that the file has of its {name} are in no layer of it"
    if left > MOST_UNUSED * held:
        raise ValueError(f"{text}: it is of a larger model than that of model.config")
    if left > 0:
        logger.warning("model.path: %s: %s", model.path, text)


def loading_code(model: Model) -> str:
    """Lines of Python that make the same `pipe` without genrl, where diffusers, torch and transformers are imported."""
    parts, file, base = _parts(model), json.dumps(model.path), json.dumps(model.config)
    plain = model.dtype == "float32"
    dtype, old = ("", "") if plain else (f", dtype=torch.{model.dtype}", f", torch_dtype=torch.{model.dtype}")
    if is_gguf(model.path):
        old += f", quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.{model.dtype})"
    lines = [
        f"{name} = diffusers.{kind.__name__}.from_single_file({file}, config={base}, subfolder={json.dumps(name)}{old})"
        for name, kind in parts.networks.items()
    ]
    lines += [
        f"{name} = transformers.{kind.__name__}.from_pretrained({base}, subfolder={json.dumps(name)}{dtype})"
        for name, kind in parts.besides.items()
    ]
    arguments = "".join(f", {name}={name}" for name in (*parts.networks, *parts.besides))
    if parts.networks:
        lines.append(f"pipe = diffusers.DiffusionPipeline.from_pretrained({base}{arguments}{dtype})")
    else:
        lines.append(f"pipe = diffusers.{parts.kind.__name__}.from_single_file({file}, config={base}{arguments}{old})")
    return "\n".join(lines)


def _parts(model: Model) -> _Parts:
    index = DiffusionPipeline.load_config(model.config)
    kind = getattr(diffusers, str(index["_class_name"]))
    names: dict[str, Any] = {}
    if not is_gguf(model.path):
        with safe_open(model.path, framework="pt") as file:
            names = dict.fromkeys(file.keys())
    held = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[1]}
    if any(name.startswith(tuple(LDM_VAE_KEYS)) for name in names):
        if not issubclass(kind, FromSingleFileMixin):
            raise ValueError(f"diffusers reads no whole {kind.__name__} from one file; give that of its denoiser alone")
        encoders = {name: getattr(transformers, entry[1]) for name, entry in held.items() if is_text_encoder(name)}
        besides = {name: encoder for name, encoder in encoders.items() if not _has_encoder(names, encoder)}
        return _Parts(kind, besides, {})
    denoiser = next((name for name in DENOISERS if name in held), None)
    network = getattr(diffusers, held[denoiser][1], None) if denoiser else None
    if denoiser is None or not hasattr(network, "from_single_file"):
        what = f"no {held[denoiser][1]}" if denoiser else f"nothing of a {kind.__name__}"
        raise ValueError(f"diffusers reads {what} from one file")
    return _Parts(kind, {}, {denoiser: network})


def _has_encoder(names: dict[str, Any], kind: Any) -> bool:
    """Whether a file with these weights has a text encoder of this class, as diffusers finds it."""
    if issubclass(kind, transformers.T5EncoderModel):
        return bool(is_t5_in_single_file(names))
    return bool(is_clip_model_in_single_file(kind, names))
