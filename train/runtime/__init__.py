"""The frame of a run: options, processes, resuming, checkpoints, logging."""
