"""What the mathematics of verification says, computed exactly on worlds small enough to list every text.

`enumerable` has the worlds, `exact` what a rule does in them, `frontier` the best that any weight could do. The command
`python -m eval.theory` compares them with the decoder's own counts.
"""
