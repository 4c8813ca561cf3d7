"""RLFR."""
