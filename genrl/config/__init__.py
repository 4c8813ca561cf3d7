"""Typed configuration: one YAML file, validated before anything is loaded.

Names are imported when they are first used: a method's settings import their base from here, and `schema` them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genrl.config.economy import Economy as Economy
    from genrl.config.errors import ConfigError as ConfigError
    from genrl.config.errors import Problem as Problem
    from genrl.config.files import check_files as check_files
    from genrl.config.loading import AnyConfig as AnyConfig
    from genrl.config.loading import dump as dump
    from genrl.config.loading import json_schema as json_schema
    from genrl.config.loading import load as load
    from genrl.config.loading import load_located as load_located
    from genrl.config.schema import Config as Config
    from genrl.config.schema import Evaluation as Evaluation
    from genrl.config.schema import Kernels as Kernels
    from genrl.config.schema import Model as Model
    from genrl.config.schema import Prompts as Prompts
    from genrl.config.schema import Reward as Reward
    from genrl.config.schema import Sampling as Sampling
    from genrl.config.sections import EMA as EMA
    from genrl.config.sections import Checkpoint as Checkpoint
    from genrl.config.sections import Distributed as Distributed
    from genrl.config.sections import LoRA as LoRA
    from genrl.config.sections import Monitor as Monitor
    from genrl.config.sections import Optimizer as Optimizer
    from genrl.config.vla import VLAConfig as VLAConfig
    from genrl.config.vlm import VLMConfig as VLMConfig

_HOME = {
    "economy": ("Economy",),
    "errors": ("ConfigError", "Problem"),
    "files": ("check_files",),
    "loading": ("AnyConfig", "dump", "json_schema", "load", "load_located"),
    "schema": ("Config", "Evaluation", "Kernels", "Model", "Prompts", "Reward", "Sampling"),
    "sections": ("EMA", "Checkpoint", "Distributed", "LoRA", "Monitor", "Optimizer"),
    "vla": ("VLAConfig",),
    "vlm": ("VLMConfig",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)
