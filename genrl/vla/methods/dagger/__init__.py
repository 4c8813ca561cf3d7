"""DAgger: an expert corrects the policy where the policy goes."""
