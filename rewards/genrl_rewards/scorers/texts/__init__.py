"""Written answers, text in pictures, tool use, tunes."""
