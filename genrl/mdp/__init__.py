"""Samplers recast as decision processes: pure tensors, no models."""
