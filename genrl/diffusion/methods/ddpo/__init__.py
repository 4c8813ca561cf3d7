"""DDPO."""
