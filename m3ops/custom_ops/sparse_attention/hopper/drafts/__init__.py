"""Speculative rows on Hopper: those of a sequence share the blocks that any of them selected."""
