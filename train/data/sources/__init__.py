"""Prompt sources: generated instructions, the standard library, JSONL files and hub datasets, one file each."""
