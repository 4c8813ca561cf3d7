"""Prompt files, preference sets, references, edits, and the embedded world. No torch when imported."""
