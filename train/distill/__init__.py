"""Draft models: cut from the target or a sibling, distilled towards it."""
