"""train/distill"""
