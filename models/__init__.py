"""What inference needs: the frozen target, draft heads, the checkpoint format and the decoder. Usable alone."""
