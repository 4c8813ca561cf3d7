"""Learned models of a world, and environments in them."""
