"""The log of a run (ARCHITECTURE §3): Redis streams in front, the object store as the truth."""
