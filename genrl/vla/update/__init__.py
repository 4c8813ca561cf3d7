"""Policy gradients on rollouts: what the methods that act and update share."""
