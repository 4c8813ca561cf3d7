"""PPO on action chunks."""
