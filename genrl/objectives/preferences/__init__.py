"""Losses on pairs of samples, one preferred to the other."""
