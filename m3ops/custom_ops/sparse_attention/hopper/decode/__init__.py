"""Decode attention on Hopper: keys are the rows of the products, queries their columns."""
