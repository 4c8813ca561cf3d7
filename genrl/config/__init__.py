"""Typed configuration: one YAML file, validated before anything is loaded.

Names are imported when they are first used: a method's settings import their base from here, and `schema` them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genrl.config.economy import Economy as Economy
    from genrl.config.errors import ConfigError as ConfigError
    from genrl.config.errors import Problem as Problem
    from genrl.config.loading import AnyConfig as AnyConfig
    from genrl.config.loading import dump as dump
    from genrl.config.loading import json_schema as json_schema
    from genrl.config.loading import load as load
    from genrl.config.loading import load_located as load_located
    from genrl.config.sections import EMA as EMA
    from genrl.config.sections import Checkpoint as Checkpoint
    from genrl.config.sections import Distributed as Distributed
    from genrl.config.sections import LoRA as LoRA
    from genrl.config.sections import Monitor as Monitor
    from genrl.config.sections import Optimizer as Optimizer
    from genrl.diffusion.config.files import check_files as check_files
    from genrl.diffusion.config.schema import Config as Config
    from genrl.diffusion.config.schema import Evaluation as Evaluation
    from genrl.diffusion.config.schema import Kernels as Kernels
    from genrl.diffusion.config.schema import Model as Model
    from genrl.diffusion.config.schema import Prompts as Prompts
    from genrl.diffusion.config.schema import Reward as Reward
    from genrl.diffusion.config.schema import Sampling as Sampling
    from genrl.vla.config.schema import VLAConfig as VLAConfig
    from genrl.vlm.config.schema import VLMConfig as VLMConfig

_HOME = {
    "genrl.config.economy": ("Economy",),
    "genrl.config.errors": ("ConfigError", "Problem"),
    "genrl.diffusion.config.files": ("check_files",),
    "genrl.config.loading": ("AnyConfig", "dump", "json_schema", "load", "load_located"),
    "genrl.diffusion.config.schema": ("Config", "Evaluation", "Kernels", "Model", "Prompts", "Reward", "Sampling"),
    "genrl.config.sections": ("EMA", "Checkpoint", "Distributed", "LoRA", "Monitor", "Optimizer"),
    "genrl.vla.config.schema": ("VLAConfig",),
    "genrl.vlm.config.schema": ("VLMConfig",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)
