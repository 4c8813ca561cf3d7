"""Diffusion-DPO from a preference data set."""
