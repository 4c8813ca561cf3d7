"""What pipelines and adapters are read from, and written to."""
