"""train/heads"""
