"""DiWA."""
