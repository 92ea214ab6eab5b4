"""Defaults that help texts show; apart, because importing them must cost nothing."""

from pathlib import Path

DEFAULT_LISTEN = "127.0.0.1:50051"
"""Where `millrace up` listens, and where commands look for an orchestrator, unless told otherwise."""
DEFAULT_DIRECTORY = Path("outputs/local")
"""Where `millrace up` works, and where commands look for its stack and its store."""
