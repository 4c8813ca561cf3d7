"""Episodes in an environment."""
