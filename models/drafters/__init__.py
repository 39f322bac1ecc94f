"""Sources of drafted tokens, one file each, behind the small contract in base.py."""
