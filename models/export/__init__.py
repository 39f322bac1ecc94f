"""To what others load: layouts of vLLM and SGLang, transformers' `generate`, and clear words where there is no way.

Reads checkpoints through `models.checkpoint` alone, and trains nothing.
"""
