"""Speculative decoding: draft, verify, roll back, and the measurements of it."""
