"""models/drafters/text"""
