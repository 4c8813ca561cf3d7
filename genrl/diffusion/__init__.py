"""Any diffusers pipeline as a policy, and one folder per method."""
