"""Finished rollouts on their way into the log of their run."""
