"""Questions and answers of an iteration, and their scores."""
