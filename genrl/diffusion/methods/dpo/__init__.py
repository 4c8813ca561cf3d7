"""Diffusion-DPO, online and from a preference data set."""
