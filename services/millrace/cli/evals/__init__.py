"""`millrace eval`: what is evaluated, how it is played, and what came out of it."""
