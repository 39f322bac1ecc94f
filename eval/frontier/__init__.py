"""eval/frontier"""
