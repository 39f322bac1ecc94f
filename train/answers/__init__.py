"""train/answers"""
