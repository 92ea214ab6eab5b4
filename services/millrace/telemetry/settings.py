"""The one table of placement variables: where a process listens, and where its neighbours are.

What a run does comes from its config; where processes live comes from `MILLRACE_*` environment variables, and there is
no third source. Credentials of the object store are not here: they are the usual `AWS_*` variables.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from millrace.errors import InvalidSpecError, Violation
from millrace.telemetry.logging import LEVELS, keep_secret, redact

# Kubernetes adds MILLRACE_ORCHESTRATOR_SERVICE_HOST, MILLRACE_REDIS_PORT_6379_TCP, ... for services named millrace-*.
# Variables that Kubernetes sets in pods for each Service, such as one whose name begins with `millrace`.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)$")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_PREFIX = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def parse_address(text: str) -> tuple[str, int]:
    """Split `host:port` (`[::1]:port` for IPv6) into host and port; raise ValueError for any other text.

    An IPv6 host keeps its brackets.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:50051")
    return match["host"], int(match["port"])


def bare_host(host: str) -> str:
    """Return a host without brackets, as sockets need it."""
    return host.strip("[]")


def join_address(host: str, port: int) -> str:
    """Return `host:port` as `parse_address` reads it, with brackets around an IPv6 address."""
    name = bare_host(host)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _address(text: str) -> str:
    """Return the text if it is `host:port`, else raise ValueError."""
    parse_address(text)
    return text


def _url(*schemes: str) -> Callable[[str], str]:
    """Return a function that returns a text if it is a URL of one of these schemes, else raises ValueError."""

    def check(text: str) -> str:
        """Return the text if it is a URL of one of the schemes, else raise ValueError."""
        try:
            parts = urlsplit(text)
        except ValueError:  # its text repeats parts of the URL, passwords included
            parts = urlsplit("")
        if parts.scheme not in schemes or not (parts.netloc or parts.path):
            raise ValueError(f"must be a URL that starts with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        return text

    return check


def _prefix(text: str) -> str:
    """Return the text if it may begin keys and objects, else raise ValueError."""
    if not _PREFIX.fullmatch(text):
        raise ValueError("must be 1 to 63 of a-z, 0-9, '.', '_', '-', and start with a letter or digit")
    return text


def _level(text: str) -> str:
    """Return a log level in upper case; raise ValueError if the text is none of `LEVELS`."""
    if text.upper() not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}")
    return text.upper()


def _boolean(text: str) -> bool:
    """Return the boolean that a text such as `1` or `false` means; raise ValueError for any other text."""
    if text.lower() not in _BOOLEANS:
        raise ValueError("must be 1 or 0")
    return _BOOLEANS[text.lower()]


def _seconds(text: str) -> float:
    """Return the seconds that a text gives, 0 to 3600, else raise ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise ValueError("must be seconds from 0 to 3600")
    return seconds


def _text(text: str) -> str:
    """Return the text as it is: any is valid."""
    return text


def _token(text: str) -> str:
    """Return the text if it can be a bearer token, else raise ValueError."""
    if len(text) < 32 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be a token of at least 32 characters, such as `millrace token new` makes")
    return text


def _variable(parse: Callable[[str], Any], default: Any = None, *, is_secret: bool = False) -> Any:
    """Return a dataclass field of `Settings` whose environment variable is read by `parse`.

    `default` is its value without the variable. The value of a field with `is_secret` is not in the repr of the
    settings.
    """
    return field(default=default, repr=not is_secret, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The placement of one process. Field `redis_url` is the variable `MILLRACE_REDIS_URL`, and so on."""

    redis_url_file: str | None = _variable(_text)
    """File with `redis_url`, for a Redis with a password: a mounted secret, read when the process starts. Instead of
    `redis_url`: both together are refused."""
    redis_url: str | None = _variable(_url("redis", "rediss", "unix"), is_secret=True)
    """Where the fast copy of the log is: `redis://host:6379/0`."""
    store_url: str | None = _variable(_url("file", "s3"), is_secret=True)
    """Where the log is: `file:///abs/dir` or `s3://bucket/prefix?endpoint=http://…&region=…`."""
    prefix: str = _variable(_prefix, "millrace")
    """Deployment or tenant; begins every key and object."""
    orchestrator: str | None = _variable(_address)
    """Workers: host:port of the orchestrator's gRPC server."""
    server: str | None = _variable(_address)
    """Clients: host:port of the RunService."""
    listen: str | None = _variable(_address)
    """host:port of this process's own gRPC server; port 0 takes a free one."""
    http_listen: str | None = _variable(_address)
    """Inference: host:port of its HTTP API."""
    metrics_listen: str | None = _variable(_address)
    """Orchestrator, env-server, trainer: host:port of `GET /metrics` for Prometheus; off if not set."""
    dashboard_listen: str | None = _variable(_address)
    """Orchestrator: host:port of the dashboard; off if not set."""
    advertise: str | None = _variable(_address)
    """host:port under which others reach this process's gRPC server, if it is not `listen`."""
    log_level: str = _variable(_level, "INFO")
    """DEBUG, INFO, WARNING or ERROR."""
    log_json: bool = _variable(_boolean, False)
    """Whether logs are JSON, one object per line."""
    drain_s: float = _variable(_seconds, 3.0)
    """Seconds from "not ready" to the end of accepting calls, for load balancers; 0 on one machine."""
    grace_s: float = _variable(_seconds, 10.0)
    """Seconds that calls under way have to finish at shutdown."""

    custom_code: str = _variable(_text, "")
    """Orchestrator: modules of the users' own that a run's config may name (`orchestrator.algo.import_path`),
    comma-separated, with what is below them; `*` allows all. None by default: who may submit runs must not thereby run
    code in the service. The local stack allows all, as it runs as its user."""

    queue_groups: str = _variable(_text, "")
    """Orchestrator: groups of runs that share the workers, such as `research:weight=2:quota=16,batch`: accelerators are
    shared by weight, and `quota` is the most that a group's runs have at once."""

    tls_cert: str | None = _variable(_text)
    """PEM chain that this process shows: as a server, and as a client of servers that ask for one."""
    tls_key: str | None = _variable(_text)
    """PEM key of `tls_cert`."""
    tls_ca: str | None = _variable(_text)
    """PEM certificates that this process trusts when it calls others, which makes it call with TLS; `system` are those
    of the system."""
    tls_server_name: str | None = _variable(_text)
    """Name that the certificates of the servers it calls must bear, if it is not the host that it calls."""
    tls_client_ca: str | None = _variable(_text)
    """Servers: PEM certificates by which callers must be signed (mTLS)."""
    tokens_file: str | None = _variable(_text)
    """Servers: bearer tokens that the public API accepts, as hashes, one per line."""
    worker_token_file: str | None = _variable(_text)
    """Services: the token that they show each other; all lines are accepted, the first is sent."""
    metrics_token_file: str | None = _variable(_text)
    """Services: tokens that open `GET /metrics` and nothing else, for Prometheus; the workers' token does as well."""
    engine_token_file: str | None = _variable(_text)
    """Env workers: the token for the engines' HTTP API; their env-server sets it."""
    token_file: str | None = _variable(_text)
    """Clients: file with the bearer token."""
    token: str | None = _variable(_token, is_secret=True)
    """Clients: the bearer token, where a file is no option."""
    insecure: bool = _variable(_boolean, False)
    """Whether servers may listen beyond loopback without TLS or without asking who calls."""
    health_listen: str | None = _variable(_address)
    """host:port of a second, plain text gRPC server that tells only the health; for probes that speak no TLS."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str], *, required: Iterable[str] = ()) -> Self:
        """Read the settings from environment variables and return them.

        Raises one InvalidSpecError with all variables that are malformed, missing or misspelled. `required` has fields
        (`redis_url`) or variables (`MILLRACE_REDIS_URL`). An empty variable counts as missing. The URL of Redis is read
        from its file, if one is named.
        """
        known = {variable_name(part.name): part for part in fields(cls)}
        needed = {name if name.startswith("MILLRACE_") else variable_name(name) for name in required}
        if unknown := needed - known.keys():
            raise ValueError(f"required names no setting: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {}
        violations = list(_misspelled(environ, known.keys()))
        environ = _with_redis_url(environ, violations)
        for name, part in known.items():
            text = environ.get(name, "")
            if not text:
                if name in needed:
                    violations.append(Violation(field=name, message="is not set", source="environment"))
                continue
            try:
                values[part.name] = part.metadata["parse"](text)
            except ValueError as error:
                # The violation would show a token or the URL of a secret file.
                is_hidden = name == "MILLRACE_TOKEN" or (name == "MILLRACE_REDIS_URL" and values.get("redis_url_file"))
                shown = None if is_hidden else redact(text)
                violations.append(Violation(field=name, value=shown, message=str(error), source="environment"))
        if violations:
            raise InvalidSpecError(
                violations, reason="SETTINGS_INVALID", remedy="set these environment variables and start again"
            )
        return cls(**values)

    def require(self, name: str) -> str:
        """Return the value of the field `name` as text.

        Raise InvalidSpecError, which names its variable, if it is None.
        """
        value = getattr(self, name)
        if value is None:
            missing = Violation(field=variable_name(name), message="is not set", source="environment")
            raise InvalidSpecError([missing], reason="SETTINGS_INVALID", remedy="set it and start again")
        return str(value)

    def of_stack(self) -> Self:
        """Return a copy with only the settings of access, which a stack's processes share: certificates, tokens,
        `insecure`.

        All other fields have their defaults. Without a certificate of its own the stack uses plain text, and the CA and
        the server's name are left out. Raises InvalidSpecError for a certificate without a CA.
        """
        names = [*ACCESS_FIELDS, "insecure", "token_file", "token"]
        if self.tls_cert is None:
            names = [name for name in names if name not in ("tls_ca", "tls_server_name")]
        elif self.tls_ca is None:
            missing = Violation(field="MILLRACE_TLS_CA", message="is not set, but MILLRACE_TLS_CERT is")
            remedy = "set it to the CA of that certificate: the stack's processes call each other with TLS"
            raise InvalidSpecError([missing], reason="SETTINGS_INVALID", remedy=remedy)
        return type(self)(**{name: getattr(self, name) for name in names})

    def access_environ(self) -> dict[str, str]:
        """Return the set variables of certificates and files of tokens for a child process that inherits no other
        `MILLRACE_*` variable.

        MILLRACE_INSECURE is among them if it is on.
        """
        names = {variable_name(name) for name in (*ACCESS_FIELDS, "insecure")}
        return {name: text for name, text in self.to_environ().items() if name in names and text != "0"}

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables that pass these settings to a child process.

        A file with the URL of Redis is passed in place of the URL.
        """
        environ: dict[str, str] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "redis_url" and self.redis_url_file is not None:
                continue
            if value is not None:
                environ[variable_name(part.name)] = str(int(value)) if isinstance(value, bool) else str(value)
        return environ


ACCESS_FIELDS = (
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tls_server_name",
    "tls_client_ca",
    "tokens_file",
    "worker_token_file",
    "metrics_token_file",
)
"""Settings of access between services, which all services of a deployment share."""


def variable_name(field_name: str) -> str:
    """Return the name of the environment variable of a field of Settings: `redis_url` gives `MILLRACE_REDIS_URL`."""
    return f"MILLRACE_{field_name.upper()}"


def _with_redis_url(environ: Mapping[str, str], violations: list[Violation]) -> Mapping[str, str]:
    """Return `environ`, with MILLRACE_REDIS_URL read from the file that MILLRACE_REDIS_URL_FILE names, if that is set.

    A violation is added to `violations`, and `environ` returned as it is, if the URL itself is set as well or the file
    cannot be read. The URL's password is masked in logs from then on.
    """
    name, url_name = variable_name("redis_url_file"), variable_name("redis_url")
    path = environ.get(name, "")
    if not path:
        return environ
    if environ.get(url_name):
        message = f"is set, and {name} as well: write the URL into that file, and leave this one out"
        violations.append(Violation(field=url_name, message=message, source="environment"))
        return environ
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8"
        violations.append(Violation(field=name, value=path, message=f"cannot be read: {problem}", source="environment"))
        return environ
    keep_secret(text)
    return {**environ, url_name: text}


def _misspelled(environ: Mapping[str, str], known: Iterable[str]) -> Iterable[Violation]:
    """Yield a violation for each `MILLRACE_*` variable that is unknown but nearly the name of a `known` one."""
    # Only near misses are errors: other MILLRACE_* names belong to tests, tools, or Kubernetes.
    names = sorted(known)
    for name in sorted(environ):
        if not name.startswith("MILLRACE_") or name in names or _SERVICE_LINK.search(name):
            continue
        if close := difflib.get_close_matches(name, names, n=1, cutoff=0.9):
            yield Violation(field=name, message=f"is unknown; did you mean {close[0]}?", source="environment")
