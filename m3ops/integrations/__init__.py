"""Other people's model code on m3ops; each module is imported by its own name."""
