"""Prompts, templates, masks, examples: from a data source to token ids."""
