"""Services that stand in for the real ones in a one-machine stack."""
