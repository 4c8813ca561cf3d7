"""Weights held in fewer bits (`model.quantize`), as diffusers and transformers quantise them while they load."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig

from genrl.config import Model
from genrl.config.memory_rules import missing_components, missing_packages, quantized


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
    mapping = {name: _configuration(kind, libraries[name], model.dtype) for name, kind in kinds.items()}
    return PipelineQuantizationConfig(quant_mapping=mapping)


def _configuration(kind: str, library: str, dtype: str) -> Any:
    """Of one component, which diffusers or transformers loads."""
    loader = transformers if library == "transformers" else diffusers
    if kind == "nf4":
        return loader.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return loader.TorchAoConfig(Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())
