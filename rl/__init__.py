"""Reinforcement learning of the dynamic ensemble verifier (DIVERSED): rollouts, rewards, policy gradient, trainer."""
