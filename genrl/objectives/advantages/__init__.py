"""From rewards to advantages, of finished samples and of transitions."""
