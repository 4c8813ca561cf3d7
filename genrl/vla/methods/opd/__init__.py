"""On-policy distillation of policies in simulation."""
