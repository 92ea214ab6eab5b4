"""What differs between releases with the v1 API: what happened, in words, and names of the MCP library's fields."""

import functools
import re
from collections.abc import Callable
from typing import Any

OUTGROWN = "context_length"
"""The stop condition of a conversation that does not fit the context any more."""
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
    if stop_condition == OUTGROWN:
        return True
    if error is None or error.type not in ("ProviderError", "OverlongPromptError"):
        return False
    return _says_too_long(error.message)


def _says_too_long(message: str) -> bool:
    return any(text in message.lower() for text in _TEXTS)


def stop_what_outgrows() -> None:
    """Have a conversation stop when it outgrows the context, and be scored as it stands. Idempotent.

    Release 0.3.1 does so by itself. Release 0.4 lets it fail and scores nothing, unless its harness ends well.
    """
    from verifiers.v1 import errors
    from verifiers.v1.rollout import Rollout

    if not hasattr(errors, "OverlongPromptError") and not hasattr(Rollout.fail, "_is_millraces"):
        Rollout.fail = _stopping(Rollout.fail, errors.ProviderError)


def _stopping(stock: Callable[..., None], error_class: type[Exception]) -> Callable[..., None]:
    @functools.wraps(stock)
    def fail(self: Any, error: Exception) -> None:
        # A judge's endpoint refuses, too; only what the interception noted is of the conversation itself.
        is_own = isinstance(error, error_class) and error is self._session.error
        if is_own and self.trace.num_turns and _says_too_long(str(error)):
            self.trace.stop(OUTGROWN)
        else:
            stock(self, error)

    fail._is_millraces = True  # type: ignore[attr-defined]
    return fail


def mcp_field(thing: Any, name: str) -> Any:
    """A field of the MCP library by its name in release 1, such as `inputSchema`; release 2, of 0.4: `input_schema`."""
    return getattr(thing, name if hasattr(thing, name) else re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name))
