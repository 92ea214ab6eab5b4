"""What a run is made of, as people have it: a dict, TOML files, or JSON text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import load
from millrace.v1 import run_pb2

RunConfigLike = str | Mapping[str, Any] | Path | Sequence[Path]
"""JSON text, nested keys, a TOML file, or several of which later ones win."""


def config_json(config: RunConfigLike, *, kind: run_pb2.RunKind) -> str:
    """The JSON text that the server is sent; InvalidSpecError names every mistake in a file with its line.

    Text and dicts are checked by the server alone. No variable of this process is read: what was given is sent.
    """
    if isinstance(config, str):
        return config
    if isinstance(config, Mapping):
        return json.dumps(config)
    files = [config] if isinstance(config, Path) else list(config)
    model = EvalRunConfig if kind == run_pb2.RUN_KIND_EVAL else RLConfig
    arguments = [word for file in files for word in ("@", str(file))]
    return load(model, arguments, {}).config.resolved_json()
