"""Any diffusers pipeline as a policy, and one file per trainer."""
