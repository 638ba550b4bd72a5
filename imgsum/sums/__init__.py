"""Sums files: their grammar, and the verification of what they list."""
