"""Methods on the forward process: finished samples, noised again."""
