"""Preferences between pictures of one prompt."""
