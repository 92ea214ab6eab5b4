"""The queue of runs: in which order they get workers, and why one waits."""
