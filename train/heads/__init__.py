"""Training of draft heads: hidden states, targets, losses, trainer, acceptance."""
