"""The events of a run: written, archived, read by cursor."""
