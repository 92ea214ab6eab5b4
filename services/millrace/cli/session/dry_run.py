"""`--dry-run`: the resolved config, as it would be submitted, and a look at what it names on this machine."""

import importlib
import json
from pathlib import Path

import click

from millrace.cli.session.model_path import is_path
from millrace.config import RLConfig, SFTConfig
from millrace.config.section import Document

_ROWS_LOOKED_AT = 256


def print_config(config: Document) -> None:
    """Print every key with its value as JSON (TOML cannot say null) on standard output."""
    click.echo(json.dumps(json.loads(config.resolved_json()), indent=2))


def look_at_data(config: SFTConfig) -> bool:
    """Read the first rows of every local data file; whether one of them is a conversation. Raises as `load_sources`.

    Rows of the Hub are not looked at. A path that is not there gets a note: the config may be for another machine.
    """
    try:
        from millrace.trainer.sft.local_files import is_local, is_there
        from millrace.trainer.sft.rows import is_conversation, load_sources
    except ImportError:  # the command line alone is installed, without what trains
        return False
    has_conversations = False
    sources = {"data": config.data} | ({} if config.val is None else {"val.data": config.val.data})
    for key, source in sources.items():
        if not is_local(source.name):
            continue
        if is_there(source.name):
            found = load_sources(source, key=key, most=_ROWS_LOOKED_AT)
            has_conversations |= any(is_conversation(row) for each in found for row in each.rows)
        else:
            click.echo(
                f"note: {key}.name: there is no {source.name} on this machine, so no row was looked at", err=True
            )
    return has_conversations


def look_at_model(key: str, name: str, *, tokenizer: str | None, needs_template: bool, output_dir: str) -> None:
    """Look at a model that is a directory on this machine; the errors are those of a run that starts.

    A model of the Hub is not looked at. A path that is not there gets a note: the config may be for another machine.
    """
    directory, other = Path(name).expanduser(), Path(tokenizer or name).expanduser()
    if not is_path(name, output_dir=output_dir):
        return
    if not directory.is_dir() or not other.is_dir():
        click.echo(f"note: {key}: there is no {name} on this machine, so the model was not looked at", err=True)
        return
    try:
        looker = importlib.import_module("millrace.models.look")  # by name: the command line works without torch
    except ModuleNotFoundError:
        return
    for note in looker.look_at(directory, tokenizer=other, needs_template=needs_template):
        click.echo(f"note: {key}: {note}", err=True)


def look_at_models(config: RLConfig) -> None:
    """Look at the model of an RL run, with the tokenizer that it is published with."""
    from millrace.models.vocabulary import plays_conversations

    look_at_model(
        "trainer.model.name",
        config.trainer.model.name,
        tokenizer=config.trainer.tokenizer.name,
        needs_template=plays_conversations(config),
        output_dir=config.output_dir,
    )
