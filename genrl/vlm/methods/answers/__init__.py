"""Groups of answers to questions."""
