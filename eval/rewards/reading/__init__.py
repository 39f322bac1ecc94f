"""How rewards read what a model wrote: columns, thoughts, numbers, words, programs."""
