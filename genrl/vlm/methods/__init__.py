"""Training methods for token policies and their presets."""
