"""What decoding with trained parts gains and what it costs: side-by-side measurements and their reports."""
