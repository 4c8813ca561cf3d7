"""Typed configuration: one YAML file, validated before anything is loaded."""

from genrl.config.errors import ConfigError, Problem
from genrl.config.files import check_files
from genrl.config.loading import dump, json_schema, load, load_located
from genrl.config.schema import (
    EMA,
    Checkpoint,
    Config,
    DiffusionNFT,
    Distributed,
    Evaluation,
    FlowGRPO,
    LoRA,
    Model,
    Optimizer,
    Prompts,
    Reward,
    Sampling,
    Window,
)

__all__ = [
    "EMA",
    "Checkpoint",
    "Config",
    "ConfigError",
    "DiffusionNFT",
    "Distributed",
    "Evaluation",
    "FlowGRPO",
    "LoRA",
    "Model",
    "Optimizer",
    "Problem",
    "Prompts",
    "Reward",
    "Sampling",
    "Window",
    "check_files",
    "dump",
    "json_schema",
    "load",
    "load_located",
]
