"""Typed configuration: one YAML file, validated before anything is loaded."""

from genrl.config.errors import ConfigError, Problem
from genrl.config.files import check_files
from genrl.config.loading import dump, json_schema, load, load_located
from genrl.config.schema import (
    EMA,
    Checkpoint,
    Config,
    Contrast,
    DiffusionNFT,
    Distributed,
    Evaluation,
    FlowGRPO,
    LayerTuning,
    LoRA,
    Model,
    Optimizer,
    Prompts,
    Prune,
    Reward,
    Sampling,
    Tree,
    Window,
)

__all__ = [
    "EMA",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Contrast",
    "DiffusionNFT",
    "Distributed",
    "Evaluation",
    "FlowGRPO",
    "LayerTuning",
    "LoRA",
    "Model",
    "Optimizer",
    "Problem",
    "Prompts",
    "Prune",
    "Reward",
    "Sampling",
    "Tree",
    "Window",
    "check_files",
    "dump",
    "json_schema",
    "load",
    "load_located",
]
