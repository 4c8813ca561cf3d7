"""Flow-DPPO."""
