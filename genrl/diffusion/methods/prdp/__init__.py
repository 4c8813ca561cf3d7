"""PRDP."""
