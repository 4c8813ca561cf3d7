"""Learning from what is recorded: transitions, critics, imitation and regression, which several methods share."""
