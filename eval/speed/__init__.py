"""eval/speed"""
