"""Supervised fine-tuning on answers that are given."""
