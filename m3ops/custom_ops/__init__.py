"""The ops: one folder each, from contract to kernel."""
