"""Reinforcement-learning fine-tuning for generative models."""

from genrl.quiet import hush

__version__ = "0.1.0"

hush()
