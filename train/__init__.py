"""Training of draft heads: prompts, the target's own answers, hidden states, losses and the trainer."""
