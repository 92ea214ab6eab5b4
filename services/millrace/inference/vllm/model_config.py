"""What a policy's files say about its model, beside the one that vLLM was started with."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def config_problem(wanted_dir: Path, held_dir: Path) -> str:
    """How the policy's config.json differs from that of vLLM's model; empty if it does not where it matters."""
    wanted, held = _config(wanted_dir), _config(held_dir)
    differing = sorted(key for key in wanted.keys() | held.keys() if wanted.get(key) != held.get(key))
    if not differing:
        return ""
    return f"the policy's config.json is not that of vLLM's model (differing: {', '.join(differing[:8])})"


def has_weights(directory: Path) -> bool:
    """Whether there are safetensors files in it."""
    return any(directory.glob("*.safetensors"))


def _config_file(model: Path) -> Path:
    """Of a directory, or of a Hub id, which vLLM has downloaded and still calls by its id."""
    path = model / "config.json"
    if path.is_file() or not _HUB_ID.fullmatch(str(model)):
        return path
    found = try_to_load_from_cache(str(model), "config.json")
    return Path(found) if isinstance(found, str) else path


def _config(directory: Path) -> dict[str, Any]:
    path = _config_file(directory)
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return {key: value for key, value in config.items() if key not in _NOISE}
