"""Policy gradients on the steps of a sampler: settings, plans, records, estimates and updates."""
