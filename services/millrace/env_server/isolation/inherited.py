"""Which variables of the env-server its workers inherit: environments are foreign code that runs code of models.

They need variables of their own (keys of judges, caches, proxies), whose names we cannot know; so variables that lead
to our data or to the machine's identity are withheld, by name and by value:

* everything of ours (`MILLRACE_*`), except how to log, where agents reach workers, and marks for finding orphans;
* credentials and addresses of stores, clouds, clusters, agents and container engines;
* every variable whose value holds the URL of Redis or of the store, or a path of the spool or of scratch files.

With `MILLRACE_ENV_PASS`, a list of names and patterns, nothing is inherited but those and what programs need to run.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from millrace.config.sections.shared import WITHHELD_KEY_PREFIX
from millrace.errors import InvalidSpecError, Violation
from millrace.rpc.access import is_loopback
from millrace.storage.scratch import SCRATCH_VARIABLE
from millrace.telemetry.settings import Settings, variable_name

PASS_VARIABLE = "MILLRACE_ENV_PASS"
SPOOL_VARIABLE = "MILLRACE_SPOOL_DIR"
LISTEN_VARIABLE = "MILLRACE_AGENT_LISTEN"
HOST_VARIABLE = "MILLRACE_AGENT_HOST"
_OURS = "MILLRACE_"
_PASSED_ON = {"MILLRACE_LOG_LEVEL", "MILLRACE_LOG_JSON", "MILLRACE_STACK_ID", "MILLRACE_STACK_PROCESS"}
_PASSED_ON |= {LISTEN_VARIABLE, HOST_VARIABLE}
_PLACEMENT = {variable_name(part.name) for part in fields(Settings)} - _PASSED_ON
# Profiles and role files lead to the same keys; an environment that needs a store of its own gets it by its args.
_STORE_CREDENTIALS = "AWS_"
_URLS = (variable_name("redis_url"), variable_name("store_url"))
_PATHS = (SPOOL_VARIABLE, SCRATCH_VARIABLE)
# Where environments and programs are found: such a directory was put there on purpose.
_SEARCH_PATHS = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}
_WITHHELD = re.compile(
    r"AWS_.*|AZURE_.*|ARM_.*|GOOGLE_.*|GCLOUD_.*|GCP_.*|CLOUDSDK_.*|OCI_.*|ALIBABA_CLOUD_.*|S3_.*|MINIO_.*"
    r"|REDIS.*|VALKEY.*|KUBERNETES_.*|KUBE.*|.*_SERVICE_HOST|.*_SERVICE_PORT(_\w+)?|.*_PORT_\d+_(TCP|UDP)(_\w+)?"
    r"|VAULT_.*|CONSUL_.*|NOMAD_.*|DOCKER_.*|CONTAINER_HOST|PODMAN_.*|SSH_.*|GPG_.*|DBUS_.*"
    r"|XDG_RUNTIME_DIR|GITHUB_.*|GITLAB_.*|CI_.*|ACTIONS_.*|WANDB_.*|PGPASS.*|PIP_(EXTRA_)?INDEX_URL|SUDO_.*"
    r"|OTEL_EXPORTER_OTLP_(\w+_)?HEADERS|INVOCATION_ID|JOURNAL_STREAM|NOTIFY_SOCKET|LISTEN_FDS|CREDENTIALS_DIRECTORY|PWD|OLDPWD|_"
)
# What programs need to run, where only what is named passes.
_BASE = [
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "TMPDIR", "VIRTUAL_ENV"),
    *("PYTHON*", "LD_LIBRARY_PATH", "OMP_*", "MKL_*", "OPENBLAS_*", "MALLOC_*", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_*", "HF_ENDPOINT", "XDG_CACHE_HOME"),
    *("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "*_PROXY", "*_proxy"),
]


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ`, the env-server's, that its workers inherit.

    With MILLRACE_ENV_PASS only those named there and what programs need; without it all. Variables that lead to our
    data, by name (`is_withheld`) or value, are left out either way.
    """
    allowed = environ.get(PASS_VARIABLE, "").replace(",", " ").split()
    patterns = [*_BASE, *_PASSED_ON, *allowed] if allowed else ["*"]
    secrets = [text for name in _URLS if (text := environ.get(name, ""))]
    directories = [text.rstrip("/") for name in _PATHS if (text := environ.get(name, ""))]
    return {
        name: value
        for name, value in environ.items()
        if not is_withheld(name)
        and any(fnmatchcase(name, pattern) for pattern in patterns)
        and not any(text in value for text in secrets)
        and not (name not in _SEARCH_PATHS and _is_below(value, directories))
    }


def is_withheld(name: str) -> bool:
    """Return whether workers never inherit a variable of this name, whatever its value."""
    if name.startswith(_OURS):
        return name not in _PASSED_ON
    return _WITHHELD.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Return whether the variable is one of the deployment: the place of Redis, store or token files, or the store's
    keys.

    A run's config may not name such a variable as one that holds an API key.
    """
    is_placement = name.startswith(_OURS) and not name.startswith(WITHHELD_KEY_PREFIX) and name not in _PASSED_ON
    return is_placement or name in _PLACEMENT or name.startswith(_STORE_CREDENTIALS)


def api_key_problem(variable: str) -> str:
    """Return why workers of this env-server do not have the API key in the variable: it is unset, or withheld from
    them.

    "" if they have it, or if the name is "".
    """
    if not variable or worker_environ(os.environ).get(variable):
        return ""
    if os.environ.get(variable):
        return "names a variable that environments do not get; put the endpoint's key into one of its own"
    return _unset_problem(variable)


def teacher_key_problem(variable: str) -> str:
    """Return why this process cannot use the variable for the teacher's API key; "" if it can, or if the name is "".

    Only this process asks the teacher, so workers need not have the key. A variable of the deployment is refused.
    """
    if variable and is_ours(variable):  # a run's config names it, and the URL that it would be sent to
        return "is a variable of the deployment; put the teacher's key into one of its own"
    return "" if not variable or os.environ.get(variable) else _unset_problem(variable)


def _unset_problem(variable: str) -> str:
    """Return the problem of a variable for an API key that is not set here."""
    return f"is not set in the env-server's environment; start it with {variable}=<the endpoint's API key>"


def _is_below(value: str, directories: Sequence[str]) -> bool:
    """Return whether a path in the value, in which `:` separates several, is one of the directories or below one."""
    parts = value.split(os.pathsep)
    return any(part == path or part.startswith(f"{path}/") for part in parts for path in directories)


# Where workers listen for agents: variables of the env-server, which its workers inherit.
#
# `MILLRACE_AGENT_LISTEN` is `HOST` or `HOST:FIRST-LAST`, with a port for each worker; `MILLRACE_AGENT_HOST` is the name
# by which agents in containers or on other hosts reach it. The connection is not encrypted.

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentListen:
    """Where workers listen for agents."""

    host: str = _LOOPBACK
    ports: Sequence[int] = (0,)
    advertised_host: str = _LOOPBACK
    """The host in the addresses that agents get."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "AgentListen":
        """Read from a process's variables where workers listen for agents; by default on loopback, at any free port.

        Raises InvalidSpecError, also for an address beyond loopback without MILLRACE_INSECURE, because requests are in
        plain text.
        """
        text = environ.get(LISTEN_VARIABLE, "").strip() or _LOOPBACK
        host, _, ports = text.rpartition(":") if text.count(":") == 1 else (text.strip("[]"), "", "")
        first, _, last = ports.partition("-")
        numbers = [first, last or first] if ports else ["0", "0"]
        if not host or not all(number.isdecimal() and int(number) < 65536 for number in numbers):
            message = "must be HOST, HOST:PORT or HOST:FIRST-LAST, such as 172.17.0.1:20000-20099"
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        found = range(int(numbers[0]), int(numbers[1]) + 1)
        if not found:
            message = "the last port must not be below the first"
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        advertised = environ.get(HOST_VARIABLE, "").strip()
        if not advertised and host in ("0.0.0.0", "::"):
            message = f"listens on every address, so {HOST_VARIABLE} must say by which one agents reach it"
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        if not is_loopback(host) and not Settings.from_env(environ).insecure:
            message = (
                "agents reach it in plain text, the token of their rollout included; on a network that is protected "
                "otherwise, such as a bridge of containers, set MILLRACE_INSECURE=1, or leave this variable out"
            )
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        return cls(host=host, ports=found, advertised_host=advertised or host)
