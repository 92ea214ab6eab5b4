"""Cannot be imported."""

raise ImportError("a library is missing")
