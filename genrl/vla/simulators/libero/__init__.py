"""LIBERO's tasks (arXiv 2306.03310), by the published protocols."""
