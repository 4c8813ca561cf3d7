"""GRPO on action chunks."""
