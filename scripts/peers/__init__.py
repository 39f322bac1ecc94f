"""Checks against other programs, each in an environment of its own; not part of the tests."""
