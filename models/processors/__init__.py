"""models/processors"""
