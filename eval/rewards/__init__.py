"""Rewards: what a completion is worth, as functions with trl's signature. `loading` finds them; each has a file here.

This file imports nothing: the processes that run model-written code (`jail`) pass through it and must start fast.
"""
