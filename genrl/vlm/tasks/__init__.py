"""Tasks that need no download: drawn pictures, a question about each, and the answer that a rule can check."""
