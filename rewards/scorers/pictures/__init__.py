"""Likeness, statistics and video."""
