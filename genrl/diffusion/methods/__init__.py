"""Training methods for diffusion and flow models, one folder each, and what they share."""
