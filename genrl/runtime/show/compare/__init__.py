"""People compare two models blind: the page that they judge on, the key of its sides, and what their votes say."""
