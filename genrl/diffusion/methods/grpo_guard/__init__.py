"""GRPO-Guard."""
