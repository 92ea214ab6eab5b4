"""The tasks of an environment: which there are, and which of them are played."""
