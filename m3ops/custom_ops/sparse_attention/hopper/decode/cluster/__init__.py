"""Joining splits by a cluster of multiprocessors that write into each other's shared memory."""
