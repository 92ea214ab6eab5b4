"""Whole files of prime-rl as one file of ours: which document they are, and the text in our schema."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config import trl_names as trl

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_DOCUMENT_KEYS = {
    "rl": {"orchestrator", "trainer", "inference_gpu_ids", "trainer_gpu_ids"},
    "sft": {"data", "val", "loss_impl"},
    "eval": {"environment_ids", "client", "weights_dir", "use_tqdm", "source", "endpoint_id", "endpoints_path"},
    "orchestrator": {
        *("batch_size", "token_batch_size", "rollouts_per_example", "group_size", "environment", "env", "sampling"),
        *("buffer", "train", "algo", "renderer", "oversampling_factor", "max_off_policy_steps"),
    },
    "trainer": {"optim", "scheduler", "loss", "weights", "micro_batch_tokens"},
    "inference": {
        *("parallel", "server", "vllm", "gpu_memory_utilization", "max_num_seqs", "enable_lora", "router"),
        *("api_server_count", "backend_port", "enable_expert_parallel"),
    },
}
"""Keys at the top that only one kind of document has, the surest kind first."""
_NAMES = (("sft", "sft"), ("train", "trainer"), ("orch", "orchestrator"), ("infer", "inference"), ("eval", "eval"))
WHOLE = ("rl", "sft", "eval")


def kind_of(tree: Mapping[str, Any], name: str) -> str | None:
    """The document that a file is: `rl`, `sft`, `eval`, or one service's part of a run; None if nothing tells."""
    stem = f"{Path(name).parent.name}/{Path(name).stem}" if Path(name).stem in ("config",) else Path(name).stem
    named = next((kind for part, kind in _NAMES if part in stem.lower()), None)
    if named in ("orchestrator", "trainer", "inference") and not _DOCUMENT_KEYS["rl"] & tree.keys():
        return named  # files of the split form are called so, and may hold next to nothing
    flat = _flat_kind(tree)
    if flat is not None:
        return flat
    found = next((kind for kind, keys in _DOCUMENT_KEYS.items() if keys & tree.keys()), None)
    if found == "trainer" and named == "sft":
        return "sft"  # `[optim]` alone
    return found or named or ("rl" if trl.is_trl(tree) else None)


def _flat_kind(tree: Mapping[str, Any]) -> str | None:
    """The document of a flat file, as Hosted Training and the commands of verifiers have them; None for another."""
    if isinstance(tree.get("eval"), list):
        return "eval"
    if isinstance(tree.get("sft"), dict) or ("dataset" in tree and isinstance(tree.get("model"), str)):
        return "sft"
    is_trained = isinstance(tree.get("model"), str) and "env" in tree and "client" not in tree
    return "rl" if is_trained and not isinstance(tree.get("source"), list) else None


def toml(tree: Mapping[str, Any]) -> str:
    """A tree as TOML: values first, then tables; None, which TOML cannot say, is left out."""
    return "\n".join(_table(tree, ())).strip() + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    inner = {key: value for key, value in table.items() if _is_table(value) or _is_tables(value)}
    lines += [
        f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in inner and value is not None
    ]
    for key, value in inner.items():
        here = (*path, key)
        header = ".".join(map(_key, here))
        if _is_tables(value):
            for item in value:
                lines += ["", f"[[{header}]]", *_inline(item)]
        else:
            body = _table(value, here)
            is_only_tables = value and all(_is_table(each) or _is_tables(each) for each in value.values())
            lines += body if is_only_tables else ["", f"[{header}]", *body]
    return lines


def _inline(item: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in item.items() if value is not None]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return "{ " + ", ".join(_inline(value)) + " }" if value else "{}"
        case list():
            return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return repr(value) if isinstance(value, float) else str(value)


def merged(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Trees laid over each other, the last one winning."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            known = result.get(key)
            result[key] = merged([known, value]) if isinstance(known, dict) and isinstance(value, dict) else value
    return result
