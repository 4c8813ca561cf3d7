"""Simulators as vectorised environments whose actions are chunks."""
