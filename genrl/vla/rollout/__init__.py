"""Policies acting in simulators: sampling chunks and recording what was decided."""
