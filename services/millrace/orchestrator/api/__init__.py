"""The public API, served."""
