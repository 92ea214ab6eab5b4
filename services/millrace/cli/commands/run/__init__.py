"""`millrace run` and its commands. Some ask a server; some read the object store directly."""
