"""The HTTP side: who may ask, what is answered, and where."""
