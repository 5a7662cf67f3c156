"""Joining splits in the kernel that computes them, by the program that comes last."""
