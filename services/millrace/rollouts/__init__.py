"""Data types of the field (rollout, sample, batch) and their wire form."""
