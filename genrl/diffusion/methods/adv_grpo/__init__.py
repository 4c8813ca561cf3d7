"""Adv-GRPO."""
