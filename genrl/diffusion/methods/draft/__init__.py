"""Direct reward back-propagation."""
