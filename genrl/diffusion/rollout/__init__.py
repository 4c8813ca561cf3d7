"""Samples of an iteration: which prompts, from which noise, in which trees, and their scores."""
