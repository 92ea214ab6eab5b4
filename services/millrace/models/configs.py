"""`config.json` as transformers makes a config of it, in more spellings than it takes. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.models.files import read_object
from millrace.storage.clean_up import TemporaryDirectory

_CONFIG = "config.json"
_FORMAT_KEYS = ("dtype", "torch_dtype")
_FORMATS = ("float64", "float32", "float16", "bfloat16", "double", "float", "half")


def read_config(directory: Path) -> Any:
    """Return the config in a directory, with the errors of transformers; CorruptObjectError (MODEL_FILE_UNUSABLE).

    A format of weights that is no name of one ("auto", "bf16", a number) says nothing, and the files do; some programs
    write "torch.bfloat16". transformers looks all of these up in torch and fails.
    """
    from transformers import AutoConfig

    raw = read_object(directory / _CONFIG)
    said = _with_known_formats(raw)
    if said == raw:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    with TemporaryDirectory(prefix="millrace-config-") as name:
        (Path(name) / _CONFIG).write_text(json.dumps(said))
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    config._name_or_path = str(directory)
    return config


def read_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a directory, with the errors of transformers, which reads the config there as well."""
    from transformers import AutoTokenizer

    given: dict[str, Any] = {}
    if (directory / _CONFIG).is_file():
        raw = read_object(directory / _CONFIG)
        given = {"config": read_config(directory)} if _with_known_formats(raw) != raw else {}
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **given)


def _with_known_formats(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and those in it, without formats of weights that are none."""
    found: dict[str, Any] = {}
    for key, value in said.items():
        if key in _FORMAT_KEYS and value is not None and not isinstance(value, dict):
            name = str(value).removeprefix("torch.")
            if name in _FORMATS:
                found[key] = name
        else:
            found[key] = _with_known_formats(value) if isinstance(value, dict) and key.endswith("_config") else value
    return found
