"""From `millrace inference @ infer.toml` to the service process of a replica, which takes this process's place."""

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from millrace.cli.errors import CliError
from millrace.cli.session.model_path import check_models
from millrace.config.load import Loaded, load
from millrace.config.sections.inference import InferenceConfig, ReplicaConfig
from millrace.inference.launch_env import engine_environ, engine_python, with_engine
from millrace.telemetry.settings import Settings, variable_name

_EXAMPLE = "millrace inference @ examples/reverse_text/infer.toml"
_SECTIONS = frozenset(ReplicaConfig.model_fields)


def load_replica(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Loaded[ReplicaConfig]:
    """Load and check the config; InvalidSpecError with everything that is wrong, CliError if nothing is named."""
    if not arguments:
        raise CliError("no config is named", hint=f"name a file: {_EXAMPLE}; or a model: --model.name DIRECTORY")
    return load(ReplicaConfig, _with_section(arguments), environ)


def start_replica(loaded: Loaded[ReplicaConfig], environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Become the replica's process."""
    config = with_engine(loaded.config.inference, environ)
    settings = Settings.from_env(environ)
    model = config.model.name if "inference.model.name" in loaded.sources else None
    if model is None and settings.orchestrator is None:
        raise CliError(
            "there is nothing to serve: neither a model nor an orchestrator is named",
            hint="name a model (--model.name DIRECTORY), or set MILLRACE_ORCHESTRATOR and MILLRACE_STORE_URL to serve "
            "the policies of its runs",
        )
    if model is not None:
        check_models({"inference.model.name": model}, sources=loaded.sources, output_dir="outputs", sft_hint=True)
    host, port = config.server.host, config.server.port or 0
    given = {
        "MILLRACE_LISTEN": settings.listen or f"{host}:0",
        "MILLRACE_HTTP_LISTEN": f"{host}:{port}" if port or settings.http_listen is None else settings.http_listen,
        variable_name("log_level"): loaded.config.log.level.upper(),
        variable_name("log_json"): str(int(loaded.config.log.json_logging)),
        **({"MILLRACE_MODEL": model} if model is not None else {}),
        **engine_environ(config),
    }
    python = engine_python(config.engine, environ)
    sys.stdout.flush()
    child = {"PYTHONUNBUFFERED": "1", **environ, **given}
    if config.engine == "vllm":
        child.pop("PYTHONDONTWRITEBYTECODE", None)  # vLLM imports in 16 s without bytecode, in 8 s with it
    os.execve(python, [python, "-m", "millrace.inference.main"], child)


def _with_section(arguments: Sequence[str]) -> list[str]:
    """The arguments with every key of `[inference]` under that name: files and flags may leave it out."""
    words: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            name = word[1:] or (rest.pop(0) if rest else "")
            words += [*([] if _has_section(name) else ["--inference"]), "@", *([name] if name else [])]
        elif word.startswith("--"):
            words.append(_with_prefix(word[2:]))
        else:
            words.append(word)
    return words


def _with_prefix(flag: str) -> str:
    """`--inference.parallel.tp=2` for `parallel.tp=2`; `--no-inference.…` for `no-…`."""
    off = flag[:3] if flag.startswith(("no-", "no_")) else ""
    first = flag.removeprefix(off).partition("=")[0].partition(".")[0].replace("-", "_")
    is_bare = first in InferenceConfig.model_fields and first not in _SECTIONS
    return f"--{off}{'inference.' if is_bare else ''}{flag.removeprefix(off)}"


def _has_section(name: str) -> bool:
    """Whether a file has `[inference]` or `[log]`; what cannot be read is the loader's to report."""
    try:
        text = Path(name).read_text()
        tree = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError):
        return True
    return isinstance(tree, dict) and bool(_SECTIONS & tree.keys())
