"""Gradients through rewards and decoder."""
