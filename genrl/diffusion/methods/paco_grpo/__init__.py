"""PaCo-GRPO."""
