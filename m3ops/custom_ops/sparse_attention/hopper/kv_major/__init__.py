"""Prefill attention that reads each block once for all the tokens that selected it."""
