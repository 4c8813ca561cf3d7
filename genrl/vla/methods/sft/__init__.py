"""Supervised training on demonstrations."""
