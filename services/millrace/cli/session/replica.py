"""From `millrace inference @ infer.toml` to the service process of a replica, which takes this process's place."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from millrace.cli.errors import CliError
from millrace.cli.session.model_path import check_models
from millrace.cli.session.part import PARTS
from millrace.config.argv import RESERVED_FLAGS
from millrace.config.load import Loaded, load
from millrace.config.sections.inference import ReplicaConfig
from millrace.inference.launch_env import engine_environ, engine_python, with_engine
from millrace.telemetry.settings import Settings, join_address, variable_name

_EXAMPLE = "millrace inference @ examples/reverse_text/infer.toml"


def load_replica(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Loaded[ReplicaConfig]:
    """Load and check the config; InvalidSpecError with everything that is wrong, CliError if nothing is named."""
    if not arguments:
        raise CliError("no config is named", hint=f"name a file: {_EXAMPLE}; or a model: --model.name DIRECTORY")
    reserved = {**RESERVED_FLAGS, "bench": False, "bench.steps": True}
    words = PARTS["inference"].named(arguments, reserved=reserved)
    return load(ReplicaConfig, words, environ, section="inference", reserved=reserved)


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
    is_named = port or settings.http_listen is None
    given = {
        "MILLRACE_LISTEN": settings.listen or join_address(host, 0),
        "MILLRACE_HTTP_LISTEN": join_address(host, port) if is_named else str(settings.http_listen),
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
