"""Vision-language policies: log-probabilities of completions, and every published GRPO variant as a preset."""
