"""Block scores: the largest dot product of an index query with the visible keys of a block."""
