"""ArCHer."""
