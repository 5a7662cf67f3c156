"""Speculative rows on Hopper: the rows of a sequence share every block that any of them selected."""
