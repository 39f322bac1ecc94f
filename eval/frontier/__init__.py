"""Acceptance against reward: points, intervals, tables, plots."""
