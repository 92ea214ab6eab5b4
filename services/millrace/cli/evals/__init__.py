"""`millrace eval`: its command line, the play of an evaluation, and the results."""
