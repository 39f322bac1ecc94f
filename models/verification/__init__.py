"""Rules that judge a drafted block: pure functions of p, q, drafted tokens and uniforms; no model, no cache, no I/O.

`base` has the records; `token` what all rules that go token by token share, and the lossless one; one file a family
holds the others; `options` makes a rule from its configuration.
"""
