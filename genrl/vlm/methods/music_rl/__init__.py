"""MusicRL."""
