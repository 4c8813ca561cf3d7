"""Reinforcement-learning fine-tuning for generative models."""

__version__ = "0.1.0"
