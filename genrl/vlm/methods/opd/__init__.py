"""On-policy distillation of language models."""
