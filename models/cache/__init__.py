"""The one place that appends to and rolls back the cache; attention over it."""
