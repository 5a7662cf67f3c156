"""The benchmark harness: ``python benchmarks/run.py --help``."""
