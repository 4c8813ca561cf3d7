"""Flow-GRPO."""
