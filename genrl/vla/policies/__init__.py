"""Vision-language-action policies, embedded and published, and their parts."""
