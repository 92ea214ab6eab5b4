"""What differs between releases with the v1 API: words for what happened, and names of the MCP library's fields."""

import re
from typing import Any

_STOP = "context_length"
# The texts of engines, and that of the renderer's own check before it asks one.
_TEXTS = (
    "maximum context length",
    "maximum model length",
    "exceeded model",
    "context_length_exceeded",
    "prompt_too_long",
)


def is_too_long(stop_condition: str, error: Any | None) -> bool:
    """Whether an episode ended because the prompt does not fit: 0.3.1 stops it, 0.4 records the provider's error."""
    if stop_condition == _STOP:
        return True
    if error is None or error.type not in ("ProviderError", "OverlongPromptError"):
        return False
    return any(text in error.message.lower() for text in _TEXTS)


def mcp_field(thing: Any, name: str) -> Any:
    """A field of the MCP library by its name in release 1, such as `inputSchema`; release 2, of 0.4: `input_schema`."""
    return getattr(thing, name if hasattr(thing, name) else re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name))
