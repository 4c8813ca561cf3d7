"""PromptRL."""
