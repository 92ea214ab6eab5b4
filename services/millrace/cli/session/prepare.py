"""Turn a command line of `rl` or `run submit` into a checked config, before anything starts."""

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
    """A checked run, ready to be submitted."""

    config: RLConfig
    settings: Settings
    server: str | None
    """host:port of the orchestrator; None if a local stack is started."""
    server_origin: str
    """Where that address came from, for error messages."""
    name: str | None
    """The name the user gave; None if none was given."""
    is_dry_run: bool
    shown: Mapping[str, Any] | None
    """What a dry run prints with `--set-only`: the keys that are set. None prints all keys."""
    labels: Mapping[str, str]
    """Free labels of the run."""
    is_checked: bool
    """Whether the environments are loaded before the run is submitted."""
    is_plain: bool
    is_follow: bool
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    """The flags of the command that are not keys of the config."""
    resume_step: int | None = None
    """The step from which an existing run continues; -1 for the newest, None for a new run."""
    must_exist: bool = False
    """Whether it is an error if there is no such run; otherwise a new run begins."""


def prepare(
    arguments: Sequence[str],
    *,
    command: str = "millrace rl",
    default_server: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Prepared:
    """Load the config and check the whole command line; print notes about keys without effect.

    `default_server` is the orchestrator to submit to if none is named; None starts a local stack. `command` begins the
    example in errors. Raises InvalidSpecError with all problems of the config, CliError if there is neither a file nor
    a model.
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
    # `resume_step = -1` is the newest step of a run that need not exist yet.
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
    """Split the arguments into those without `--label KEY=VALUE` and the labels.

    Raises CliError for a label without a key or a value.
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
    """Return the orchestrator's address (`--server`, MILLRACE_SERVER or `default`), and where it came from, as text.

    The address is None if a local stack is to be started.
    """
    if "server" in flags:
        return check_address(str(flags["server"]), option="--server"), "--server"
    return settings.server or default, "MILLRACE_SERVER" if settings.server else "the default"


def _say_what_a_running_stack_keeps(loaded: Loaded[RLConfig], stack: Mapping[str, Any] | None) -> None:
    """Print a note with the keys that have no effect, because the run is submitted to a stack that is already running.

    `stack` is the content of its `stack.json`, None if that is not here. Keys that have the same value there are left
    out.
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
    """Return the known settings of a running stack, by key; with the embedded engine, the defaults are included."""
    known = (stack or {}).get("settings")
    if not isinstance(known, dict):
        return {}
    if known.get("inference.engine") != "embedded":
        return known
    return {**_flat(InferenceConfig().model_dump(), "inference"), **_flat(LogConfig().model_dump(), "log"), **known}


def _shown(key: str, value: Any) -> str:
    """Return the value of a key as text for a note; "a secret" if it looks like one."""
    return shown(tuple(key.split(".")), value) or "a secret"


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a tree of tables as one table with dotted keys, each after `prefix`."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}") if isinstance(value, dict) and value else {f"{prefix}.{name}": value}
    return flat


def _value(config: RLConfig, key: str) -> Any:
    """Return the value at a dotted key of the config; None if there is no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def _say_what_the_engine_ignores(config: RLConfig) -> None:
    """Print a note with the fields of `extra_body` that the embedded engine does not support."""
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
    """Return a config layer that sets `inference.engine` from MILLRACE_ENGINE, weaker than files and flags.

    None if it is not set.
    """
    engine = environ.get("MILLRACE_ENGINE")
    if not engine:
        return None
    origin = Provenance(label="MILLRACE_ENGINE", strength=Strength.ENVIRONMENT)
    return Layer(tree={"inference": {"engine": engine}}, origin=origin)


def without_resume_step(config: RLConfig) -> tuple[RLConfig, int | None]:
    """Return the config without `resume_step`, and that step: it is not part of a run's config.

    The step is None if no `ckpt` table sets it; the one at the top goes before the trainer's.
    """
    found = next((part.resume_step for part in (config.ckpt, config.trainer.ckpt) if part is not None), None)
    if found is None:
        return config, None

    def dropped(section: Any) -> Any:
        """Return a copy of a section without the step in its `ckpt`."""
        return section.model_copy(
            update={"ckpt": section.ckpt and section.ckpt.model_copy(update={"resume_step": None})}
        )

    return dropped(config).model_copy(update={"trainer": dropped(config.trainer)}), found


def choose_run_id(config: RLConfig, name: str | None, *, root: Path) -> str:
    """Return the id of a run on a local stack: the given name, or one made of the environment and a random suffix.

    A made name has no directory of results below `root`.
    """
    if name is not None:
        return name
    return free_name(config.orchestrator.env[0].id, secrets.token_hex(2), root=root)


def _with_checked_model(loaded: Loaded[RLConfig], server: str | None) -> Loaded[RLConfig]:
    """Check that a local stack will find the model.

    For a server on this machine, return the config with absolute paths.
    """
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
    """Return the config with the absolute path of a local model: a running stack has another working directory.

    Print a note if the path does not exist.
    """
    name = loaded.config.model.name
    if not is_path(name, output_dir=loaded.config.output_dir):
        return loaded
    if not Path(name).expanduser().is_dir():
        print(f"note: {name} (model.name) is not here; the trainer has to find it where it runs", file=sys.stderr)
        return loaded
    absolute = str(Path(name).expanduser().resolve())
    return replace(loaded, config=loaded.config.with_model(absolute))


def _with_absolute_rows(loaded: Loaded[RLConfig]) -> Loaded[RLConfig]:
    """Return the config with the absolute path of a local `[trainer.dataset]`.

    Unchanged if it is not on this machine.
    """
    trainer = loaded.config.trainer
    if trainer.dataset is None or not Path(trainer.dataset.name).expanduser().exists():
        return loaded
    absolute = str(Path(trainer.dataset.name).expanduser().resolve())
    dataset = trainer.dataset.model_copy(update={"name": absolute})
    trainer = trainer.model_copy(update={"dataset": dataset})
    return replace(loaded, config=loaded.config.model_copy(update={"trainer": trainer}))


# Names for runs that are to be made.


def check_new_name(text: str, *, option: str = "--name") -> str:
    """Return `text` if it is a valid run name.

    Otherwise raise InvalidSpecError with a similar valid name as the remedy, and `option` as the field.
    """
    if run_name.is_legal(text):
        return text
    close = run_name.suggest(text)
    source = "command line" if option.startswith("--") else None
    violation = Violation(field=option, value=repr(text), message=run_name.RULE, source=source)
    raise InvalidSpecError([violation], remedy=f"for example {option} {close}" if close else "choose such a name")


def free_name(stem: str, tail: str = "", *, root: Path) -> str:
    """Return a name without a directory of results under `root`: `{stem}-{tail}`, or that with `-2`, `-3`, …
    appended.
    """

    def is_taken(name: str) -> bool:
        return (root / name).exists() and any((root / name).iterdir())

    return run_name.make(stem, tail, is_taken=is_taken)


# `--dry-run`: the resolved config, as it would be submitted, and a look at what it names on this machine.


def print_config(config: Document, *, only: Mapping[str, Any] | None = None) -> None:
    """Print the config as JSON on standard output; `only` replaces it by the keys that are set. (TOML has no null.)"""
    click.echo(json.dumps(json.loads(config.resolved_json()) if only is None else only, indent=2))


def validate_fine_tuning(config: SFTConfig) -> None:
    """Check the data files and the model of a fine-tuning as far as they are on this machine: the first rows, and which
    of their tokens would be trained on. The errors are those the training would raise. Missing files only get a note,
    because the config may be for another machine.
    """
    try:
        look = importlib.import_module("millrace.trainer.sft.look")  # by name: the command line works without torch
    except ModuleNotFoundError:
        return
    tables = look.tables(config)
    found = [
        each
        for key, table in tables.items()
        if (each := look.first_rows(key, table, is_paired=config.dpo is not None)) is not None
    ]
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
    """Check a model directory on this machine, and return whether it was checked.

    `key` is the config key that names it. `tokenizer` is a directory with another tokenizer; `needs_template` says that
    its chat template is used. The errors are those the run would raise. Models of the Hub are skipped; a missing path
    only gets a note, because the config may be for another machine.
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
    """Check the model and the tokenizer of an RL run, and the rows of its `[trainer.dataset]`, if they are on this
    machine.
    """
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
    """Return whether a model name is a path on this machine, not an id of the Hub (`Qwen/Qwen3-0.6B`).

    A path begins with `.`, `/` or `~`, is in the output directory, has more than one slash (ids have at most one), or
    exists.
    """
    first = name.partition("/")[0]
    return (
        name.startswith((".", "/", "~"))
        or first in ("outputs", Path(output_dir).name)
        or name.count("/") > 1
        or Path(name).exists()
    )


def check_models(names: Mapping[str, str], *, sources: Mapping[str, str], output_dir: str, sft_hint: bool) -> None:
    """Raise InvalidSpecError with each path in `names` (by config key) that is not a model.

    `sources` says where keys are written. `sft_hint` adds to the remedy how to make a model with `millrace sft`.
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
    """Return why a model's name is a path without a model, as a message; None if it has one or is an id of the Hub."""
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
