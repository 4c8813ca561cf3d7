"""Advantages, surrogates, weights and aggregation of token policies."""
