"""Checkpoints: their files, index and manifest, and going on from the newest that is whole."""
