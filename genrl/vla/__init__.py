"""Vision-language-action policies: simulators, chunks of actions, normalisation."""
