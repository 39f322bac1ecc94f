"""train/runtime"""
