"""Arguments of TRL's trainers as users keep them: YAML or JSON for `trl grpo --config`, or a script with a config."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.files import MAX_FILE_BYTES, UnreadableFileError, read_file
from millrace.config.trl_names import is_trl

_CONFIGS = {"GRPOConfig": "rl", "SFTConfig": "sft"}
_BESIDE = {"GRPOTrainer", "SFTTrainer", "ModelConfig", "ScriptArguments", "LoraConfig"}
_RENAMED = {
    "GRPOTrainer": {"model": "model_name_or_path"},
    "SFTTrainer": {"model": "model_name_or_path"},
    "LoraConfig": {"r": "lora_r", "bias": "lora_bias", "task_type": "lora_task_type"},
}
_OF_RL = {"num_generations", "max_completion_length", "beta", "epsilon", "reward_funcs", "scale_rewards", "use_vllm"}
_OF_SFT = {"max_length", "max_seq_length", "packing", "assistant_only_loss", "completion_only_loss"}
_OF_SFT |= {"dataset_text_field", "padding_free"}


@dataclass(slots=True)
class Arguments:
    """What a file says: values by TRL's name, where each stands, and what is computed there."""

    values: dict[str, Any]
    kind: str | None
    """`rl` or `sft`; None where nothing tells."""
    places: dict[str, str] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """The text of values that only running the script would give."""


def read_arguments(name: str) -> Arguments | None:
    """Return the arguments in a file; None if it holds none of TRL. UnreadableFileError for one that cannot be read."""
    suffix = Path(name).suffix.lower()
    if suffix == ".py":
        return _read_script(name)
    values = _read_yaml(name) if suffix in (".yaml", ".yml") else read_file(name).tree
    if not isinstance(values, dict) or not is_trl(values):
        return None
    return Arguments(values=dict(values), kind=_kind(values))


def _kind(values: Mapping[str, Any]) -> str | None:
    of_rl, of_sft = bool(values.keys() & _OF_RL), bool(values.keys() & _OF_SFT)
    return None if of_rl == of_sft else "rl" if of_rl else "sft"


def _text(name: str) -> str:
    try:
        data = Path(name).read_bytes()
        if len(data) > MAX_FILE_BYTES:
            message = f"has more than {MAX_FILE_BYTES} bytes; it is no config file"
            raise UnreadableFileError(name, message, source="command line")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
    raise UnreadableFileError(name, message, source="command line")


def _read_yaml(name: str) -> Any:
    text = _text(name)
    try:
        import yaml  # transformers brings it
    except ModuleNotFoundError as error:
        message = "is YAML, and PyYAML is not installed here; `pip install pyyaml`, or save it as JSON"
        raise UnreadableFileError(name, message, source="command line") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        message = f"malformed YAML: {getattr(error, 'problem', None) or error}; fix it"
        raise UnreadableFileError(name, message, source=where) from error


def _read_script(name: str) -> Arguments | None:
    """Read the calls of TRL's classes in a script, which is not run."""
    try:
        tree = ast.parse(_text(name))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"malformed Python: {error}; fix it"
        raise UnreadableFileError(name, message, source=f"{name}:{getattr(error, 'lineno', None) or 1}") from error
    found = Arguments(values={}, kind=None)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in _CONFIGS:
            found.kind = _CONFIGS[called]
        elif called not in _BESIDE:
            continue
        for keyword in call.keywords:
            _take(found, called, keyword, name)
        if called == "LoraConfig":
            found.values.setdefault("use_peft", True)
    return found if found.kind is not None else None


def _take(found: Arguments, called: str, keyword: ast.keyword, name: str) -> None:
    """Take an argument of a call: its value, or the text of what computes it."""
    if keyword.arg is None:  # `**kwargs`
        found.computed[f"**{ast.unparse(keyword.value)}"] = ast.unparse(keyword.value)
        return
    key = _RENAMED.get(called, {}).get(keyword.arg, keyword.arg)
    is_wiring = called.endswith("Trainer") and key not in ("model_name_or_path", "reward_funcs")
    if is_wiring:  # the objects that the script has made: their own calls are read
        return
    found.places[key] = f"{name}:{keyword.value.lineno}"
    try:
        found.values[key] = ast.literal_eval(keyword.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found.computed[key] = ast.unparse(keyword.value)
