"""Policy-gradient surrogates, divergences and value losses."""
