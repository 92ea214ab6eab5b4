"""`--dry-run`: the resolved config, as it would be submitted, and a look at what it names on this machine."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from millrace.config import RLConfig, SFTConfig
from millrace.config.section import Document
from millrace.config.sections.environments import have_conversations
from millrace.config.sections.rl import plays_conversations
from millrace.errors import InvalidSpecError, Violation
from millrace.models.files import why_no_model


def print_config(config: Document, *, only: Mapping[str, Any] | None = None) -> None:
    """Print every key with its value as JSON (TOML cannot say null) on standard output, or `only` what is set."""
    click.echo(json.dumps(json.loads(config.resolved_json()) if only is None else only, indent=2))


def look_at_fine_tuning(config: SFTConfig) -> None:
    """Look at the first rows of local data files, at a local model, and at what it would be trained on of these rows.

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
    if not look_at_model(
        "model.name", name, tokenizer=None, needs_template=needs_template, output_dir=config.output_dir
    ):
        return
    for each in found:
        for note in look.look_at_rows(config, each, directory=Path(name).expanduser()):
            click.echo(f"note: {each.key}: {note}", err=True)


def look_at_model(key: str, name: str, *, tokenizer: str | None, needs_template: bool, output_dir: str) -> bool:
    """Look at a model that is a directory on this machine, if it is one; the errors are those of a run that starts.

    A model of the Hub is not looked at. A path that is not there gets a note: the config may be for another machine.
    """
    directory, other = Path(name).expanduser(), Path(tokenizer or name).expanduser()
    if not is_path(name, output_dir=output_dir):
        return False
    if not directory.is_dir() or not other.is_dir():
        click.echo(f"note: {key}: there is no {name} on this machine, so the model was not looked at", err=True)
        return False
    try:
        looker = importlib.import_module("millrace.models.look")  # by name: the command line works without torch
    except ModuleNotFoundError:
        return False
    for note in looker.look_at(directory, tokenizer=other, needs_template=needs_template):
        click.echo(f"note: {key}: {note}", err=True)
    return True


def look_at_models(config: RLConfig) -> None:
    """Look at the model of an RL run, with the tokenizer that it is published with."""
    look_at_model(
        "trainer.model.name",
        config.trainer.model.name,
        tokenizer=config.trainer.tokenizer.name,
        needs_template=plays_conversations(config),
        output_dir=config.output_dir,
    )


# Whether a model's name is a path, and whether the path holds a model: asked before anything starts.


def is_path(name: str, *, output_dir: str = "outputs") -> bool:
    """Whether a model name means a path on this machine rather than the id of a model hub (`Qwen/Qwen3-0.6B`).

    A path begins with `.`, `/` or `~`, lies under the output directory, has more than one slash (hub ids have at most
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
    """InvalidSpecError for every name (by its key) that is a path without a model in it.

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
