"""Block selection: the best blocks of every row, forced ones first, ties to the lower id."""
