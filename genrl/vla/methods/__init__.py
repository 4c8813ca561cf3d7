"""Training methods for policies in simulation, one folder each, and what they share."""
