"""Millrace: asynchronous reinforcement learning of language models as services."""

__version__ = "0.1.0"
