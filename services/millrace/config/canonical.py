"""The canonical JSON form of a config and its hash."""

import hashlib
import json

from pydantic import BaseModel


def canonical_json(config: BaseModel) -> str:
    """Every field, keys sorted, no spaces: equal configs give equal text."""
    return json.dumps(
        config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def run_hash(resolved_json: str) -> str:
    """sha256, in hex, of a resolved config."""
    return hashlib.sha256(resolved_json.encode()).hexdigest()
