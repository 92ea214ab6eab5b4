"""Confinement of an environment's processes: limits, capabilities, files, network."""
