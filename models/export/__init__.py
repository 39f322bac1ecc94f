"""To what others load: vLLM's Medusa layout, transformers' `generate`, and clear words where there is no way.

Reads checkpoints through `models.checkpoint` alone, and trains nothing.
"""
