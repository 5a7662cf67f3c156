"""Attention on Hopper, with warps that copy and warps that multiply."""
