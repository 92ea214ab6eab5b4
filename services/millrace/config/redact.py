"""How values appear in messages: short, and never a secret."""

import json
import re
from typing import Any

from millrace.config.paths import Path

_SECRET_KEY = re.compile(r"(^|_)(api_?key(_var)?|token|secret|password|credentials?)$")
_SECRET_VALUE = re.compile(r"^(sk-|hf_|ghp_|AKIA|Bearer )")
_LONGEST = 80


def shown(path: Path, value: Any) -> str | None:
    """A value as JSON-like text, cut to 80 characters; None for what looks like a secret."""
    if _is_secret(path, value):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_secret(path: Path, value: Any) -> bool:
    """Whether the key's name or the value's form, here or below, says that the value is a secret."""
    match value:
        case dict():
            return any(_is_secret((*path, key), item) for key, item in value.items())
        case list():
            return any(_is_secret(path, item) for item in value)
        case str() if _SECRET_VALUE.match(value):
            return True
        case _:
            last = next((part for part in reversed(path) if isinstance(part, str)), "")
            return isinstance(value, str) and bool(_SECRET_KEY.search(last.lower().replace("-", "_")))
