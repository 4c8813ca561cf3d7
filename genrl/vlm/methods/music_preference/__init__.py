"""MusicRL's reward model of preferences."""
