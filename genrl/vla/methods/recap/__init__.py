"""RECAP: a policy that is told which actions of mixed data were better than usual."""
