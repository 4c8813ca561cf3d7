"""Typed configuration: one YAML file, validated before anything is loaded.

What the kinds of runs share is here; the sections of a kind are in its own package (`genrl.diffusion.config`,
`genrl.vla.config`, `genrl.vlm.config`), which nothing here imports by name.
"""

from genrl.config.errors import ConfigError as ConfigError
from genrl.config.errors import Problem as Problem
from genrl.config.loading import dump as dump
from genrl.config.loading import load as load
from genrl.config.loading import load_located as load_located
from genrl.config.run_config import RunConfig as RunConfig
from genrl.config.run_config import check_files as check_files
from genrl.config.sections import EMA as EMA
from genrl.config.sections import Checkpoint as Checkpoint
from genrl.config.sections import Distributed as Distributed
from genrl.config.sections import Economy as Economy
from genrl.config.sections import LoRA as LoRA
from genrl.config.sections import Monitor as Monitor
from genrl.config.sections import Optimizer as Optimizer
