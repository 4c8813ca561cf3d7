"""Token policies: vision-language models, code and image tokens, masked text."""
