"""Turn a command line of `millrace eval` into a checked evaluation, before anything starts."""

import ast
import json
import os
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.cli.connection import check_address, stack_at
from millrace.cli.errors import CliError
from millrace.cli.evals.policies import EvalPolicy, RunPolicies, of_directory, of_run
from millrace.cli.session.config_file import explained, print_notes, refuse_check
from millrace.cli.session.prepare import check_models, check_new_name, free_name, is_path
from millrace.config import ClientConfig, EvalRunConfig
from millrace.config.argv import COMMAND_LINE, RESERVED_FLAGS
from millrace.config.layers import Layer, Provenance, Strength
from millrace.config.load import load
from millrace.config.sections.inference import InferenceConfig
from millrace.telemetry.settings import Settings

EXAMPLE = "millrace eval @ eval.toml"
EVAL_FLAGS: Mapping[str, bool] = {
    **RESERVED_FLAGS,
    "weights-dir": True,
    "run": True,
    "steps": True,
    "store": True,
    "eval-base": False,
    "endpoints-path": True,
    "resume": False,
}
_ENVIRONMENT_IDS = ("--environment-ids", "--environment_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEval:
    """A checked evaluation, ready to be played."""

    config: EvalRunConfig
    settings: Settings
    server: str | None
    """host:port of the orchestrator; None if a local stack is started."""
    server_origin: str
    name: str
    """The name that was given, or one made of the first environment and a random suffix."""
    is_dry_run: bool
    is_plain: bool
    is_resumed: bool = False
    """Whether an evaluation that an earlier command began under this name is continued."""
    part_of: str = ""
    """For one policy out of several: the name of the whole evaluation.

    Then the path of the weights may differ between attempts.
    """
    weights: str = ""
    """For one policy out of several: the digest of its weights."""
    inference: InferenceConfig = field(default_factory=lambda: InferenceConfig(engine="embedded"))
    """The engine that a local stack starts for the model."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The GPUs of that engine, in the format of `StackOptions`."""
    policies: tuple[EvalPolicy, ...] = ()
    """The policies to compare; empty if only `model.name` is evaluated."""


def prepare_eval(arguments: Sequence[str], *, environ: Mapping[str, str] = os.environ) -> PreparedEval:
    """Load the config and check the whole command line.

    Raises InvalidSpecError with all problems of the config, CliError for what is missing on this machine.
    """
    settings = Settings.from_env(environ)
    arguments = _with_environments(arguments)
    weights, of, store = (_value(arguments, f"--{name}") for name in ("weights-dir", "run", "store"))
    run = RunPolicies.open(of, store_url=store or _store_url(settings), prefix=settings.prefix) if of else None
    begun = run.model_name if run is not None else weights
    with explained(arguments, command="eval", example=EXAMPLE):
        loaded = load(EvalRunConfig, arguments, environ, reserved=EVAL_FLAGS, base=_base(begun))
    refuse_check(loaded)
    flags = loaded.flags
    config = _with_endpoint(loaded.config, str(flags.get("endpoints-path", "")) or None)
    steps = _steps(flags.get("steps"), is_sweep=bool(weights or run))
    print_notes(loaded.notes)
    server, origin = settings.server, "MILLRACE_SERVER"
    if "server" in flags:
        server, origin = check_address(str(flags["server"]), option="--server"), "--server"
    name = str(flags.get("name") or config.run.name or "")
    if name:
        check_new_name(name, option="--name" if flags.get("name") else "run.name")
    policies: list[EvalPolicy] = []
    if weights or run is not None:
        if server is not None and "server" not in flags:
            print(f"note: a stack of this command serves the policies, not {server} ({origin})", file=sys.stderr)
            server = None
        _check_sweep(config, server and f"{server} ({origin})", has_both=bool(weights and run is not None))
        base, has_base = Path(config.model.name).expanduser(), flags.get("eval-base") is not False
        if run is not None:
            policies = of_run(run, steps=steps, has_base=has_base, base=base)
        else:
            policies = of_directory(Path(weights or ""), steps=steps, has_base=has_base, base=base)
    elif not flags.get("dry-run"):
        _check_place(config, server, loaded.sources, environ)
    if flags.get("resume"):
        _check_resume(name, server)
    return PreparedEval(
        config=config,
        settings=settings,
        server=server,
        server_origin=origin,
        name=name or free_name(f"eval-{config.env[0].name}", secrets.token_hex(2), root=Path(config.output_dir)),
        is_dry_run=bool(flags.get("dry-run")),
        is_plain=bool(flags.get("plain")),
        is_resumed=bool(flags.get("resume")),
        policies=tuple(policies),
    )


def _store_url(settings: Settings) -> str | None:
    """Return the object store for `--run`: MILLRACE_STORE_URL, or the store of the local stack that listens at
    MILLRACE_SERVER.
    """
    stack = stack_at(settings.server) if settings.server and settings.store_url is None else None
    return settings.store_url if stack is None else stack.text("store")


def _with_environments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with each `--environment-ids a,b` replaced by the `--env` list that it abbreviates."""
    words: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in _ENVIRONMENT_IDS:
            words.append(f"{name}{equals}{value}")
            continue
        text = value if equals else (rest.pop(0) if rest else "")
        ids = [word for each in text.strip("[] ").split(",") if (word := each.strip(" \"'"))]
        words.append(f"--env={json.dumps([{'id': each} for each in ids])}")
    return words


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of `flag` in the arguments, None if it is not there.

    It is needed before the config is loaded, because it decides about the defaults.
    """
    found = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def _base(model: str | None) -> Layer | None:
    """Return a config layer that sets `model.name`, weaker than files and flags; None without a model."""
    if model is None:
        return None
    origin = Provenance(label=COMMAND_LINE, strength=Strength.ENVIRONMENT)
    return Layer(tree={"model": {"name": model}}, origin=origin)


def _with_endpoint(config: EvalRunConfig, path: str | None) -> EvalRunConfig:
    """Return the config with the endpoint that `model.name` is an alias of, in the file or directory `path`.

    Without `path` the usual places are searched. The config is returned unchanged if it has an endpoint, or, without
    `path`, if the name is a directory or no file has the alias. Raises CliError if `path` lacks the alias, or the
    endpoint is not usable.
    """
    if config.client is not None or (path is None and is_path(config.model.name, output_dir=config.output_dir)):
        return config
    endpoint = find_endpoint(config.model.name, path)
    if endpoint is None:
        return config
    client = ClientConfig(base_url=list(endpoint.urls), api_key_var=endpoint.key_var)
    config = config.with_model(endpoint.model).model_copy(update={"client": client})
    if problems := config.broken_rules():
        raise CliError(
            f"the endpoint {endpoint.model!r} cannot be asked: {problems[0].message}", hint="correct its url"
        )
    return config


def _steps(text: str | bool | None, *, is_sweep: bool) -> list[int] | None:
    """Parse the value of `--steps`, `10,20` or `[10, 20]`.

    Raises CliError if it is not a list of steps, or if neither a run nor a directory of weights is evaluated.
    """
    if text is None:
        return None
    if not is_sweep:
        raise CliError("--steps says which steps of what", hint="add --run RUN or --weights-dir DIR")
    words = [word for word in str(text).strip("[] ").replace(",", " ").split() if word]
    if not words or not all(word.isdecimal() for word in words):
        raise CliError(f"--steps {text} is no list of steps", hint="for example --steps 10,20")
    return [int(word) for word in words]


def _check_resume(name: str, server: str | None) -> None:
    """Raise CliError if `--resume` has no name, or if a server runs the evaluation."""
    if not name:
        raise CliError(
            "--resume goes on with an evaluation of this machine, and needs its name", hint="add --name NAME"
        )
    if server is not None:
        message = f"--resume is for a stack of this command; {server} goes on with its runs by itself"
        raise CliError(message, hint=f"follow it: millrace run watch {name}")


def _check_sweep(config: EvalRunConfig, server: str | None, *, has_both: bool) -> None:
    """Raise CliError if an endpoint or `server` is to evaluate the policies of a run or of a directory of weights.

    Only a local stack serves such policies. `server` is the named server as text, None for none. `has_both` says that
    run and directory are both named, which is an error, too.
    """
    if has_both:
        raise CliError("--run and --weights-dir both name the policies", hint="keep one of them")
    if config.client is not None:
        raise CliError(
            "an endpoint serves its own model, and policies are named",
            hint="leave [client] out: then a stack is started for each policy; or leave --run and --weights-dir out",
        )
    if server is not None:
        raise CliError(
            f"policies are served by a stack of this command, not by {server}",
            hint="leave --server out",
        )


def _check_place(
    config: EvalRunConfig, server: str | None, sources: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    """Raise CliError unless there is a model directory or an endpoint to evaluate.

    On `server` (None: on this machine) only an endpoint is evaluated. `sources` says where each key of the config is
    written. The variable with the endpoint's key must be set in `environ` if this command starts the env-server.
    """
    if config.client is None:
        if server is not None:
            raise CliError(
                "an evaluation on a server needs an endpoint that serves the model",
                hint="name it with --client.base-url URL, or leave --server out: then a stack is started for the model",
            )
        if not is_path(config.model.name, output_dir=config.output_dir):
            raise CliError(
                f"model.name is {config.model.name!r}, which is no directory, and there is no [client]",
                hint="name a directory with a Hugging Face model, or the endpoint that serves it (--client.base-url)",
            )
        check_models({"model.name": config.model.name}, sources=sources, output_dir=config.output_dir, sft_hint=True)
        return
    variable = config.client.api_key_var
    if variable and server is None and not environ.get(variable):
        raise CliError(
            f"client.api_key_var names {variable}, and that environment variable is not set",
            hint=f"export {variable}=<the endpoint's API key>, or leave client.api_key_var out if it needs none",
        )


# Aliases of endpoints: `endpoints.toml` as verifiers has it, and the older `prepare.py`, which is read, not run.

_PLACES = (Path("configs"), Path())
_NAMES = ("endpoints.toml", "endpoints.py")
_FORM = 'write [[endpoint]] with endpoint_id = "…", model = "…", url = "https://…/v1", key = "NAME_OF_THE_VARIABLE"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One alias: the model's name at the endpoint, its URLs, and the variable that contains the key."""

    model: str
    urls: tuple[str, ...]
    key_var: str | None


def find_endpoint(alias: str, path: str | None) -> Endpoint | None:
    """Return the endpoint with this alias; None if there is none.

    `path` is a file or a directory with one; without it, `configs/` and the current directory are searched. Raises
    CliError if the file is invalid, or if `path` is given and does not have the alias.
    """
    file = _file(path)
    if file is None:
        return None
    try:
        found = (_from_toml if file.suffix == ".toml" else _from_python)(file)
    except (OSError, ValueError, SyntaxError) as error:
        raise CliError(f"{file} lists no endpoints: {error}", hint=_FORM) from error
    variants = found.get(alias)
    if not variants:
        if path is not None:
            raise CliError(f"{file} has no endpoint {alias!r}", hint=f"it has {', '.join(sorted(found)) or 'none'}")
        return None
    first = variants[0]
    for name in ("model", "key"):
        if len({each.get(name) for each in variants}) > 1:
            raise CliError(f"{file}: the endpoints called {alias!r} differ in {name!r}", hint="give each its own name")
    urls = dict.fromkeys(str(each["url"]) for each in variants)
    return Endpoint(model=str(first["model"]), urls=tuple(urls), key_var=first.get("key"))


def _file(path: str | None) -> Path | None:
    """Return the file of endpoints at `path`, a file or its directory; None: that in the usual places, if there is one.

    Raises CliError if `path` does not exist.
    """
    if path is not None and not Path(path).is_dir():
        if not Path(path).is_file():
            raise CliError(f"--endpoints-path {path} does not exist", hint="name endpoints.toml or its directory")
        return Path(path)
    places = _PLACES if path is None else (Path(path),)
    return next((place / name for place in places for name in _NAMES if (place / name).is_file()), None)


def _from_toml(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the endpoints in a TOML file, by alias; raise ValueError for one without an alias, a model or a URL."""
    entries = tomllib.loads(path.read_text()).get("endpoint", [])
    found: dict[str, list[dict[str, Any]]] = {}
    if not isinstance(entries, list):
        raise ValueError("`endpoint` is no array of tables")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping) or not isinstance(alias := entry.get("endpoint_id"), str):
            raise ValueError(f"the {number}. [[endpoint]] has no endpoint_id")
        found.setdefault(alias, []).append(_checked(alias, entry))
    return found


def _from_python(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Parse the literal that a Python file assigns to ENDPOINTS, without running the file.

    Raises ValueError if there is none.
    """
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "ENDPOINTS" for target in targets):
            entries = ast.literal_eval(getattr(node, "value", None) or ast.Constant(None))
            if not isinstance(entries, dict):
                break
            return {
                str(alias): [_checked(str(alias), each) for each in (entry if isinstance(entry, list) else [entry])]
                for alias, entry in entries.items()
            }
    raise ValueError("it assigns no literal dict to ENDPOINTS")


def _checked(alias: str, entry: Any) -> dict[str, Any]:
    """Return an endpoint's entry as a table with `model`, `url` and `key`: the variable with the API key, or None.

    Raise ValueError if a model or URL is missing, or the entry has a type or headers that are not supported; `alias`
    names the endpoint in the error.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"endpoint {alias!r} is no table")
    found = {
        "model": entry.get("model"),
        "url": entry.get("url", entry.get("api_base_url")),
        "key": entry.get("key", entry.get("api_key_var")),
    }
    for name in ("model", "url"):
        if not isinstance(found[name], str) or not found[name]:
            raise ValueError(f"endpoint {alias!r} has no {name}")
    kind = entry.get("type", entry.get("api_client_type", "openai_chat_completions"))
    if kind not in ("openai_chat_completions", "openai"):
        raise ValueError(f"endpoint {alias!r} is of type {kind!r}; only openai_chat_completions is spoken")
    if entry.get("headers") or entry.get("extra_headers"):
        raise ValueError(f"endpoint {alias!r} has headers, which are not sent; leave them out")
    return found
