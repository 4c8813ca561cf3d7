"""V-PTR: a value function of videos teaches the picture encoder, then offline reinforcement learning."""
