"""Attention over the visible tokens of the selected blocks, its gradient, and merging of parts."""
