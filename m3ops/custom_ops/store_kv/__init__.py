"""Writing a step's tokens into the paged caches."""
