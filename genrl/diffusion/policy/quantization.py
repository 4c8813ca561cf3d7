"""Weights held in fewer bits (`model.quantize`), as diffusers and transformers quantise them while they load."""

from __future__ import annotations

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig

from genrl.diffusion.config.model_rules import missing_components, missing_packages, quantized
from genrl.diffusion.config.sections import Model
from genrl.runtime.weights.quantization import quantization_config


def quantization(model: Model) -> PipelineQuantizationConfig | None:
    """What `DiffusionPipeline.from_pretrained` is to be told; None where nothing is quantised.

    Raises ValueError, naming the key, for a component that the pipeline lacks, a package that is not installed, or a
    device that cannot.
    """
    if model.quantize is None:
        return None
    for key, problem in missing_packages(model):
        raise ValueError(f"{key}: {problem}")
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
