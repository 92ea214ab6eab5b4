"""What a policy's files say about its model, beside the one that vLLM was started with."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from millrace.errors import InvalidStateError
from millrace.policies.probe import Probe
from millrace.storage.clean_up import TemporaryDirectory

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_QUANTIZATION = "quantization_config"


def compare_configs(
    wanted_dir: Path, held_dir: Path, *, revision: str | None = None, download_dir: str | None = None
) -> tuple[str, bool]:
    """Return how the policy's config.json differs from that of vLLM's model, and whether it is that of its text part.

    Empty if it does not differ where it matters, also if vLLM's is not found: names and shapes of the tensors are
    compared in any case. `revision` and `download_dir` are those with which vLLM got a model of the Hub.
    """
    held_path, wanted_path = _config_file(held_dir, revision, download_dir), wanted_dir / "config.json"
    held = _config(held_path)
    if held is None:
        logger.warning(
            "the config.json of vLLM's model is not found: it is not compared", extra={"model": str(held_dir)}
        )
        return "", False
    wanted, is_part = _config(wanted_path) or {}, False
    keys = wanted.keys() | held.keys()
    meant, has = _understood(wanted_path), _understood(held_path)
    if meant is not None and has is not None:
        wanted, held = meant, has
        if wanted["model_type"] != held["model_type"]:  # a policy may be the text part of what vLLM holds
            part = next((part for part in _parts(held) if part["model_type"] == wanted["model_type"]), None)
            held, is_part = part or held, part is not None
        # What one of both has alone is nothing that this transformers knows, but for the format of quantised weights.
        keys = wanted.keys() & held.keys() | {_QUANTIZATION}
    differing = sorted(key for key in keys if wanted.get(key) != held.get(key))
    if not differing:
        return "", is_part
    return f"the policy's config.json is not that of vLLM's model (differing: {', '.join(differing[:8])})", is_part


def require_same_positions(model: Any, probe: Probe | None) -> None:
    """InvalidStateError if vLLM, by its `model_config`, computes other positions than the policy's trainer does.

    Where vLLM's positions follow a length, it is `max_model_len`. Of `dynamic` ones it has only those that the model
    was trained on.
    """
    if probe is None or not probe.contexts:
        return
    probe.require_context(model.max_model_len)
    rope, trained = getattr(model.hf_text_config, "rope_parameters", None) or {}, probe.contexts[-1]
    if rope.get("rope_type") == "dynamic" and (most := model.hf_text_config.max_position_embeddings) < trained:
        raise InvalidStateError(
            f"vLLM computes dynamic positions up to max_position_embeddings, {most}, only",
            reason="CONTEXT_DIFFERS",
            remedy=f"set seq_len and inference.model.max_model_len to at most {most}, or use the embedded engine",
        )


@asynccontextmanager
async def other_weights(directory: str | None, *, model: Path, scratch: Path) -> AsyncIterator[str | None]:
    """The directory that vLLM shall load in place of `model`, which is looked at; there while the block runs.

    None is the model itself. InvalidStateError (WEIGHTS_NOT_FOUND); raises as `look_at_other_weights`.
    """
    if directory is None:
        yield None
        return
    with TemporaryDirectory(prefix="weights-", directory=scratch) as place:
        yield str(await asyncio.to_thread(_look_at, Path(directory), model, Path(place) / "model"))


def _look_at(directory: Path, model: Path, place: Path) -> Path:
    from millrace.models.served import look_at_other_weights

    if not any(directory.glob("*.safetensors")):
        raise InvalidStateError(
            f"{directory} is no directory with safetensors files", reason="WEIGHTS_NOT_FOUND", remedy="name one"
        )
    return look_at_other_weights(directory, model=model, place=place)


def _config_file(model: Path, revision: str | None, download_dir: str | None) -> Path:
    """Of a directory, or of a Hub id, which vLLM has downloaded and still calls by its id."""
    path = model / "config.json"
    if path.is_file() or not _HUB_ID.fullmatch(str(model)):
        return path
    found = try_to_load_from_cache(str(model), "config.json", cache_dir=download_dir, revision=revision)
    return Path(found) if isinstance(found, str) else path


def _config(path: Path) -> dict[str, Any] | None:
    """What the file says, but for what does not matter; None if there is none."""
    if not path.is_file():
        return None
    return _plain(json.loads(path.read_bytes()))


def _understood(path: Path) -> dict[str, Any] | None:
    """The same as transformers reads it, with every default; None if it does not know it."""
    from transformers import AutoConfig

    try:
        return _plain(AutoConfig.from_pretrained(path.parent, local_files_only=True).to_dict())
    except (OSError, ValueError, KeyError):
        return None


def _parts(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configs within a config."""
    for value in config.values():
        if isinstance(value, dict) and "model_type" in value:
            yield value


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what does not matter, at every level; `type` is the older word beside `rope_type`."""
    noise = (*_NOISE, "type") if "rope_type" in config else _NOISE
    return {
        key: _plain(value) if isinstance(value, dict) else value for key, value in config.items() if key not in noise
    }
