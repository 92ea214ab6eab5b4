"""From a command line to a checked config, before anything starts: for `rl`, `run submit` and `--dry-run`."""

import importlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from millrace.cli.connection import LOOPBACK, check_address, say_environments_beside, stack_at
from millrace.cli.connection import environ as with_options
from millrace.cli.errors import CliError
from millrace.cli.session import bench
from millrace.cli.session.config_file import explained, print_notes, refuse_blocked, require_file_or_model
from millrace.config import RLConfig, SFTConfig
from millrace.config.argv import RESERVED_FLAGS
from millrace.config.layers import Layer, Provenance, Strength
from millrace.config.load import Loaded, load
from millrace.config.messages import shown
from millrace.config.prime_rl.translation import merged
from millrace.config.section import Document
from millrace.config.sections.environments import have_conversations
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.rl import plays_conversations
from millrace.config.sections.shared import LogConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.models.files import why_no_model
from millrace.runlog import names as run_name
from millrace.telemetry.settings import Settings, parse_address

_OF_THE_STACK = ("inference", "log", "inference_gpu_ids", "trainer_gpu_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is ready to be submitted."""

    config: RLConfig
    settings: Settings
    server: str | None
    """host:port of the orchestrator; None starts a local stack."""
    server_origin: str
    """Where the address of the server comes from, in words."""
    name: str | None
    """The name that the user chose."""
    is_dry_run: bool
    shown: Mapping[str, Any] | None
    """What a dry run prints: with --set-only the keys that files, command line and environment set; None for all."""
    labels: Mapping[str, str]
    """Free labels of the run."""
    is_checked: bool
    """Whether its environments are to be loaded first."""
    is_plain: bool
    is_follow: bool
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    """The command's own flags, as they were given."""
    resume_step: int | None = None
    """The step of the run of that name to go on from, -1 for the newest; None for a new run."""
    must_exist: bool = False
    """Whether to refuse to begin anew where there is no such run."""


def prepare(
    arguments: Sequence[str],
    *,
    command: str = "millrace rl",
    default_server: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Prepared:
    """Load and check the config; InvalidSpecError with everything that is wrong, before anything starts.

    CliError where neither a file nor a model is named; `command` is what its example begins with.
    """
    settings = Settings.from_env(with_options(environ))
    arguments, labels = take_labels(arguments)
    example = f"{command} @ examples/reverse_text/rl.toml"
    with explained(arguments, command="rl", example=example):
        reserved = {**RESERVED_FLAGS, **bench.flags("trainer.")}
        loaded = load(RLConfig, arguments, environ, base=_engine_of(environ), reserved=reserved)
    flags = loaded.flags
    bench.is_bench(flags, prefix="trainer.")
    if flags.get("set-only") and not flags.get("dry-run"):
        raise CliError("--set-only says what a dry run prints", hint="add --dry-run, or leave --set-only out")
    print_notes(loaded.notes)
    if not flags.get("dry-run"):
        refuse_blocked(loaded.notes)
        require_file_or_model(loaded, example=example)
    server, origin = _server_of(flags, settings, default_server)
    if server is not None:
        stack = stack_at(server)
        _say_what_a_running_stack_keeps(loaded, stack and stack.says)
        say_environments_beside(loaded.config, stack, server=server)
    else:
        _say_what_the_engine_ignores(loaded.config)
    if not flags.get("dry-run"):
        loaded = _with_checked_model(loaded, server)
    name = flags.get("name") or loaded.config.run.name
    if name:
        check_new_name(str(name), option="--name" if flags.get("name") else "run.name")
    config, resume_step = without_resume_step(loaded.config)
    must_exist = bool(flags.get("resume")) or (resume_step or 0) > 0
    return Prepared(
        config=config,
        resume_step=-1 if flags.get("resume") and resume_step is None else resume_step,
        must_exist=must_exist,
        settings=settings,
        server=server,
        server_origin=origin,
        name=str(name) if name else None,
        flags=flags,
        is_dry_run=bool(flags.get("dry-run")),
        shown=merged([layer.tree for layer in loaded.layers]) if flags.get("set-only") else None,
        labels=labels,
        is_checked=bool(flags.get("check-environments")),
        is_plain=bool(flags.get("plain")),
        is_follow=bool(flags.get("follow")),
    )


def take_labels(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments without `--label KEY=VALUE`, which may be repeated, and the labels.

    CliError for anything else.
    """
    rest: list[str] = []
    labels: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--label":
            rest.append(word)
            continue
        text = value if equals else next(words, "")
        key, is_pair, value = text.partition("=")
        if not key or not is_pair:
            raise CliError(f"--label {text} is no label", hint="write --label KEY=VALUE, once for each")
        labels[key] = value
    return rest, labels


def _server_of(flags: Mapping[str, str | bool], settings: Settings, default: str | None) -> tuple[str | None, str]:
    """Return the address of the orchestrator, if one is named, and where it comes from."""
    if "server" in flags:
        return check_address(str(flags["server"]), option="--server"), "--server"
    return settings.server or default, "MILLRACE_SERVER" if settings.server else "the default"


def _say_what_a_running_stack_keeps(loaded: Loaded[RLConfig], stack: Mapping[str, Any] | None) -> None:
    """Name the keys that are about the stack of `millrace rl`, where the run goes to one that runs already.

    Of a stack that `millrace up` started here, only those that differ, with what it has.
    """
    kept = sorted(
        key
        for key, source in loaded.sources.items()
        if key.partition(".")[0] in _OF_THE_STACK and key != "inference.model.name" and source != "MILLRACE_ENGINE"
    )
    there = _settings_of(stack)
    asked = {key: _value(loaded.config, key) for key in kept}
    differing = [
        f"{key} (asked {_shown(key, asked[key])}, there {_shown(key, there[key])})" if key in there else key
        for key in kept
        if key not in there or there[key] != asked[key]
    ]
    if differing:
        text = ", ".join(differing)
        print(f"note: a stack that runs keeps its own settings; without effect there: {text}", file=sys.stderr)


def _settings_of(stack: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is known of the settings of a stack of `millrace up`, by key: with the embedded engine all of
    them.
    """
    said = (stack or {}).get("settings")
    if not isinstance(said, dict):
        return {}
    if said.get("inference.engine") != "embedded":
        return said
    return {**_flat(InferenceConfig().model_dump(), "inference"), **_flat(LogConfig().model_dump(), "log"), **said}


def _shown(key: str, value: Any) -> str:
    return shown(tuple(key.split(".")), value) or "a secret"


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}") if isinstance(value, dict) and value else {f"{prefix}.{name}": value}
    return flat


def _value(config: RLConfig, key: str) -> Any:
    """Return the value at a dotted key; None where that is no place of the config's."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def _say_what_the_engine_ignores(config: RLConfig) -> None:
    """Name the fields of `extra_body` that the embedded engine does not have."""
    loop = config.orchestrator
    body = {name: each for env in loop.env for name, each in loop.sampling_of(env).extra_body.items()}
    if not body or config.inference.engine == "vllm" or config.inference.needs_vllm:
        return
    try:
        from millrace.inference.http.schema import ChatBody
    except ModuleNotFoundError:  # the client alone is installed: no engine is started here
        return
    if unknown := sorted(body.keys() - ChatBody.model_fields.keys()):
        where = "orchestrator.sampling.extra_body"
        print(f"note: {where}: the embedded engine has no {', '.join(unknown)}: without effect there", file=sys.stderr)


def _engine_of(environ: Mapping[str, str]) -> Layer | None:
    """Return MILLRACE_ENGINE, which the services read, as the weakest source of `inference.engine`."""
    engine = environ.get("MILLRACE_ENGINE")
    if not engine:
        return None
    origin = Provenance(label="MILLRACE_ENGINE", strength=Strength.ENVIRONMENT)
    return Layer(tree={"inference": {"engine": engine}}, origin=origin)


def without_resume_step(config: RLConfig) -> tuple[RLConfig, int | None]:
    """Return the config of the run itself, and the step that the command shall go on from."""
    found = next((part.resume_step for part in (config.ckpt, config.trainer.ckpt) if part is not None), None)
    if found is None:
        return config, None

    def dropped(section: Any) -> Any:
        return section.model_copy(
            update={"ckpt": section.ckpt and section.ckpt.model_copy(update={"resume_step": None})}
        )

    return dropped(config).model_copy(update={"trainer": dropped(config.trainer)}), found


def choose_run_id(config: RLConfig, name: str | None, *, root: Path) -> str:
    """Return the run's id for a local stack: the chosen name, or environment and a random tail without a directory
    yet.
    """
    if name is not None:
        return name
    return free_name(config.orchestrator.env[0].id, secrets.token_hex(2), root=root)


def _with_checked_model(loaded: Loaded[RLConfig], server: str | None) -> Loaded[RLConfig]:
    """Refuse a model that the stack of this command would not find; a server on this machine gets its whole path."""
    config = loaded.config
    if server is None:
        names = {"model.name": config.model.name, "trainer.model.name": config.trainer.model.name}
        check_models(names, sources=loaded.sources, output_dir=config.output_dir, sft_hint=True)
    elif parse_address(server)[0] in LOOPBACK:
        # It may live in a container with files of its own: what is not here is left to its trainer, whose answer
        # names the directory that it looked in.
        return _with_absolute_rows(_with_absolute_model(loaded))
    return loaded


def _with_absolute_model(loaded: Loaded[RLConfig]) -> Loaded[RLConfig]:
    """Name a local model by its absolute path: a stack that runs already has another working directory."""
    name = loaded.config.model.name
    if not is_path(name, output_dir=loaded.config.output_dir):
        return loaded
    if not Path(name).expanduser().is_dir():
        print(f"note: {name} (model.name) is not here; the trainer has to find it where it runs", file=sys.stderr)
        return loaded
    absolute = str(Path(name).expanduser().resolve())
    return replace(loaded, config=loaded.config.with_model(absolute))


def _with_absolute_rows(loaded: Loaded[RLConfig]) -> Loaded[RLConfig]:
    """Name the files of `[trainer.dataset]` by their absolute path if they are here, as those of the model."""
    trainer = loaded.config.trainer
    if trainer.dataset is None or not Path(trainer.dataset.name).expanduser().exists():
        return loaded
    absolute = str(Path(trainer.dataset.name).expanduser().resolve())
    dataset = trainer.dataset.model_copy(update={"name": absolute})
    trainer = trainer.model_copy(update={"dataset": dataset})
    return replace(loaded, config=loaded.config.model_copy(update={"trainer": trainer}))


# Names for runs that are to be made.


def check_new_name(text: str, *, option: str = "--name") -> str:
    """Return the name; InvalidSpecError suggests a similar legal one."""
    if run_name.is_legal(text):
        return text
    close = run_name.suggest(text)
    source = "command line" if option.startswith("--") else None
    violation = Violation(field=option, value=repr(text), message=run_name.RULE, source=source)
    raise InvalidSpecError([violation], remedy=f"for example {option} {close}" if close else "choose such a name")


def free_name(stem: str, tail: str = "", *, root: Path) -> str:
    """Return a name without results under `root`: `{stem}-{tail}`, else with `-2`, `-3`, … appended."""

    def is_taken(name: str) -> bool:
        return (root / name).exists() and any((root / name).iterdir())

    return run_name.make(stem, tail, is_taken=is_taken)


# `--dry-run`: the resolved config, as it would be submitted, and a look at what it names on this machine.


def print_config(config: Document, *, only: Mapping[str, Any] | None = None) -> None:
    """Print every key with its value as JSON (TOML cannot say null) on standard output, or `only` what is set."""
    click.echo(json.dumps(json.loads(config.resolved_json()) if only is None else only, indent=2))


def validate_fine_tuning(config: SFTConfig) -> None:
    """Validate the first rows of local data files, a local model, and which tokens of these rows it would be trained
    on.

    The errors are those of a run that starts. What is not on this machine gets a note: the config may be for another.
    """
    try:
        look = importlib.import_module("millrace.trainer.sft.look")  # by name: the command line works without torch
    except ModuleNotFoundError:
        return
    tables = look.tables(config)
    found = [each for key, table in tables.items() if (each := look.first_rows(key, table)) is not None]
    for key in tables.keys() - {each.key for each in found}:
        if look.is_local(tables[key].name):
            name = tables[key].name
            click.echo(f"note: {key}.name: there is no {name} on this machine, so no row was looked at", err=True)
    name, needs_template = config.model.name, any(each.have_conversations for each in found)
    if config.eval is not None:
        needs_template |= have_conversations(config.eval.env)
    if not validate_model(
        "model.name", name, tokenizer=None, needs_template=needs_template, output_dir=config.output_dir
    ):
        return
    for each in found:
        for note in look.look_at_rows(config, each, directory=Path(name).expanduser()):
            click.echo(f"note: {each.key}: {note}", err=True)


def validate_model(key: str, name: str, *, tokenizer: str | None, needs_template: bool, output_dir: str) -> bool:
    """Validate a model that is a directory on this machine; the errors are those of a run that starts.

    A model of the Hub is not looked at. A path that is not there gets a note: the config may be for another machine.
    """
    directory, other = Path(name).expanduser(), Path(tokenizer or name).expanduser()
    if not is_path(name, output_dir=output_dir):
        return False
    if not directory.is_dir() or not other.is_dir():
        click.echo(f"note: {key}: there is no {name} on this machine, so the model was not looked at", err=True)
        return False
    try:
        looker = importlib.import_module("millrace.models.served")  # by name: the command line works without torch
    except ModuleNotFoundError:
        return False
    for note in looker.look_at(directory, tokenizer=other, needs_template=needs_template):
        click.echo(f"note: {key}: {note}", err=True)
    return True


def validate_models(config: RLConfig) -> None:
    """Look at the model of an RL run, with the tokenizer that it is published with, and at the rows that it learns."""
    is_here = validate_model(
        "trainer.model.name",
        config.trainer.model.name,
        tokenizer=config.trainer.tokenizer.name,
        needs_template=plays_conversations(config),
        output_dir=config.output_dir,
    )
    if is_here and config.trainer.dataset is not None:
        look = importlib.import_module("millrace.trainer.sft.look")
        for note in look.look_at_dataset(config, directory=Path(config.trainer.model.name).expanduser()):
            click.echo(f"note: trainer.dataset: {note}", err=True)


# Whether a model's name is a path, and whether the path holds a model: asked before anything starts.


def is_path(name: str, *, output_dir: str = "outputs") -> bool:
    """Return whether a model name means a path on this machine rather than the id of a model hub (`Qwen/Qwen3-0.6B`).

    A path begins with `.`, `/` or `~`, is under the output directory, has more than one slash (hub ids have at most
    one), or names something that exists.
    """
    first = name.partition("/")[0]
    return (
        name.startswith((".", "/", "~"))
        or first in ("outputs", Path(output_dir).name)
        or name.count("/") > 1
        or Path(name).exists()
    )


def check_models(names: Mapping[str, str], *, sources: Mapping[str, str], output_dir: str, sft_hint: bool) -> None:
    """Raise InvalidSpecError for every name (by its key) that is a path without a model in it.

    `sft_hint` adds how to make a model with `millrace sft`.
    """
    violations = []
    for key, name in names.items():
        message = _problem(name, output_dir)
        if message and not any(violation.value == name for violation in violations):
            violations.append(Violation(field=key, value=name, message=message, source=sources.get(key)))
    if not violations:
        return
    make = "make it first, for example with `millrace sft @ examples/reverse_text/sft.toml`, or " if sft_hint else ""
    raise InvalidSpecError(
        violations, reason="MODEL_NOT_FOUND", remedy=f"{make}name a directory with a model, or a Hugging Face model id"
    )


def _problem(name: str, output_dir: str) -> str | None:
    if not is_path(name, output_dir=output_dir):
        return None
    path = Path(name).expanduser()
    if not path.is_dir():
        kind = "is a file, not a directory" if path.exists() else "does not exist"
        return f"{kind}; looked for {path.absolute()}" if path.is_absolute() else f"{kind} in {Path.cwd()}"
    if (adapter := why_no_model(path)) is not None:
        return f"{adapter}: `millrace merge {name} --base BASE --to MODEL`"
    if not (path / "config.json").is_file():
        return f"holds no Hugging Face model: there is no config.json in {path.absolute()}"
    return None
