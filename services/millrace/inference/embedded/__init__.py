"""The embedded engine: a transformers model in this process."""
