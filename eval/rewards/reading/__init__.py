"""eval/rewards/reading"""
