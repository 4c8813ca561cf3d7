"""Checkpoints, CLIP and pixels, shared by the scorers."""
