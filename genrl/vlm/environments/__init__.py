"""Environments of vision-language agents."""
