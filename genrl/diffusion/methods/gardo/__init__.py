"""GARDO."""
