"""Losses on the forward process and on differentiable rewards."""
