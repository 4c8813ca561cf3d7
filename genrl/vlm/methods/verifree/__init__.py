"""VeriFree: the likelihood of the right answer after the model's own reasoning."""
