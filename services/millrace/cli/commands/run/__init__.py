"""`millrace run` and its commands: what is asked of a server, and what is read from the store itself."""
