"""Decode scores on Hopper, as fast as the keys can be read."""
