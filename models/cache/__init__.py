"""models/cache"""
