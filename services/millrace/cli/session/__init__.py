"""One job of the command line from its arguments to its results."""
