"""Talk2Move."""
