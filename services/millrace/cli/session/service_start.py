"""`millrace orchestrator|trainer|env-server`: a service in the foreground. It replaces this process (exec)."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from millrace.cli.errors import CliError
from millrace.cli.session import bench
from millrace.cli.session.config_file import PARTS, print_notes, refuse_flags_of_runs
from millrace.cli.session.prepare import Prepared, check_models, prepare
from millrace.config.argv import RESERVED_FLAGS
from millrace.config.load import Loaded, load
from millrace.config.sections.inference import ReplicaConfig
from millrace.inference.launch_env import engine_environ, engine_python, with_engine
from millrace.telemetry.settings import Settings, join_address, variable_name

PLACES: Mapping[str, str] = {
    "listen": "host:port of the service's own gRPC server; port 0 takes a free one",
    "orchestrator": "host:port of the orchestrator; for trainer and env-server",
    "redis-url": "redis://host:6379/0; one with a password belongs into --redis-url-file",
    "redis-url-file": "file that holds the URL of Redis",
    "store-url": "file:///DIR or s3://bucket/prefix",
    "prefix": "the deployment; begins every key and object",
    "advertise": "host:port under which others reach the service, if not --listen",
    "metrics-listen": "host:port of GET /metrics",
    "log-level": "debug, info, warning or error",
}
"""Flags for a service's addresses and logs. Each is also an environment variable (`MILLRACE_STORE_URL`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service that a command can start."""

    name: str
    module: str
    section: str
    """The config section that its config files contain."""


SERVICES = {
    "orchestrator": Service(name="orchestrator", module="millrace.orchestrator.main", section="orchestrator"),
    "trainer": Service(name="trainer", module="millrace.trainer.main", section="trainer"),
    "env-server": Service(name="env-server", module="millrace.env_server.main", section="orchestrator"),
}


_BENCHES = {
    "trainer": """\
  --bench           Take steps on fake samples (--data.fake.KEY) instead, and print tokens/s, MFU, peak memory, time by
                    phase; --bench.steps N of them.
""",
    "orchestrator": """\
  --bench           Play batches of the file's run on a stack of its own, whose trainer learns nothing, and print
                    tokens/s, peak memory, time by phase; --bench.steps N of them.
""",
}


def options_help(name: str) -> str:
    """Return the text on the options of a service for `--help`."""
    names = [place for place in PLACES if place != "orchestrator" or name != "orchestrator"]
    lines = "\n".join(f"  --{place:<15} {PLACES[place]}" for place in names)
    return f"""\b
Options:
{lines}
  --KEY VALUE       Any key of the section (docs/configuration.md), as in `@ FILE`.
{_BENCHES.get(name, "")}  --dry-run         Print the resolved section and do nothing.
  --debug           Show tracebacks.

\b
Each of the upper ones is also a variable, such as MILLRACE_STORE_URL; docs/operations.md has the others, which say how
callers are checked and what environments may do."""


def load_service(service: Service, arguments: Sequence[str], environ: Mapping[str, str]) -> Loaded[Any]:
    """Load and check the config of a service; without a config, placeholders for what a run must have.

    Raises InvalidSpecError with everything that is wrong, CliError for a flag that only a run can have.
    """
    reserved = {**RESERVED_FLAGS, **dict.fromkeys(PLACES, True), **bench.flags()}
    part = PARTS[service.section]
    words = part.named(arguments, reserved=reserved)
    has_config = any(_is_of_config(word, reserved) for word in words)
    if not has_config and service.section == "orchestrator":
        words = [*words, "--orchestrator.env", '[{"id": "none"}]', "--orchestrator.rollouts-per-example", "2"]
    loaded = load(part.document, words, environ, reserved=reserved, section=part.section)
    refuse_flags_of_runs(loaded, command=service.name)
    print_notes(loaded.notes)
    return loaded


def bench_run(arguments: Sequence[str]) -> Prepared:
    """Return the run that the orchestrator's `--bench` measures: the given section, and the defaults of all others."""
    reserved = {**RESERVED_FLAGS, **dict.fromkeys(PLACES, True), **bench.flags()}
    words = PARTS["orchestrator"].named(arguments, reserved=reserved)
    return prepare(words, command="millrace orchestrator --bench")


def start_service(service: Service, loaded: Loaded[Any], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the service, with the flags as environment variables."""
    given = {
        variable_name(place.replace("-", "_")): str(loaded.flags[place]) for place in PLACES if place in loaded.flags
    }
    if "log.level" in loaded.sources:
        given.setdefault(variable_name("log_level"), loaded.config.log.level.upper())
    if "log.json_logging" in loaded.sources:
        given.setdefault(variable_name("log_json"), str(int(loaded.config.log.json_logging)))
    if loaded.files:
        print(
            f"note: {', '.join(loaded.files)} belongs to a run, and this service waits for runs; submit it with the "
            f"run's other parts: millrace run submit --{service.section} @ {loaded.files[0]} …",
            file=sys.stderr,
        )
    # What Python has buffered would be lost with the process image.
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", service.module], {"PYTHONUNBUFFERED": "1", **environ, **given})


def _is_of_config(word: str, reserved: Mapping[str, bool]) -> bool:
    """Return whether a word of a command line names a config file or a config key."""
    name = word.lstrip("-").partition("=")[0]
    return word.startswith("@") or (word.startswith("--") and name not in reserved)


# From `millrace inference @ infer.toml` to the service process of a replica, which takes this process's place.

_EXAMPLE = "millrace inference @ examples/reverse_text/infer.toml"


def load_replica(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Loaded[ReplicaConfig]:
    """Load and check the config of an inference replica.

    Raises InvalidSpecError with everything that is wrong, CliError without arguments.
    """
    if not arguments:
        raise CliError("no config is named", hint=f"name a file: {_EXAMPLE}; or a model: --model.name DIRECTORY")
    reserved = {**RESERVED_FLAGS, "bench": False, "bench.steps": True}
    words = PARTS["inference"].named(arguments, reserved=reserved)
    return load(ReplicaConfig, words, environ, section="inference", reserved=reserved)


def start_replica(loaded: Loaded[ReplicaConfig], environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by the replica. Raises CliError if there is neither a model nor an orchestrator."""
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
    # As in `start_service`: what is buffered would be lost.
    sys.stdout.flush()
    child = {"PYTHONUNBUFFERED": "1", **environ, **given}
    if config.engine == "vllm":
        child.pop("PYTHONDONTWRITEBYTECODE", None)  # vLLM imports in 16 s without bytecode, in 8 s with it
    os.execve(python, [python, "-m", "millrace.inference.main"], child)
