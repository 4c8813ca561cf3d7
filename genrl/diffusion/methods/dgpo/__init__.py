"""DGPO."""
