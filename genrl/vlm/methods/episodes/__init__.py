"""`genrl train` for a vision-language model that acts in an environment."""
