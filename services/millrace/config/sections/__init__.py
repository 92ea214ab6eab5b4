"""The sections of a config file: keys, defaults, bounds, and the rules of each."""
