"""Drafters without a network: n-grams and suffixes of the text, and the target's own Jacobi iteration."""
