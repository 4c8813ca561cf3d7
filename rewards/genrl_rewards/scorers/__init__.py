"""The built-in rewards, by what they judge."""
