"""FISOR."""
