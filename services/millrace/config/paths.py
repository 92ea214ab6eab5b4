"""Paths of config values: table keys and list indices."""

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """A path as text: ``orchestrator.env[0].id``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
