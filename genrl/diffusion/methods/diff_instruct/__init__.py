"""Diff-Instruct*."""
