"""models/target"""
