"""`--dry-run`: the resolved config, as it would be submitted, and a look at what it names on this machine."""

import json

import click

from millrace.config import SFTConfig
from millrace.config.section import Document

_ROWS_LOOKED_AT = 256


def print_config(config: Document) -> None:
    """Print every key with its value as JSON (TOML cannot say null) on standard output."""
    click.echo(json.dumps(json.loads(config.resolved_json()), indent=2))


def look_at_data(config: SFTConfig) -> None:
    """Read the first rows of every local data file; the errors are those of `load_sources`.

    Rows of the Hub are not looked at. A path that is not there gets a note: the config may be for another machine.
    """
    try:
        from millrace.trainer.sft.local_files import is_local, is_there
        from millrace.trainer.sft.rows import load_sources
    except ImportError:  # the command line alone is installed, without what trains
        return
    sources = {"data": config.data} | ({} if config.val is None else {"val.data": config.val.data})
    for key, source in sources.items():
        if not is_local(source.name):
            continue
        if is_there(source.name):
            load_sources(source, key=key, most=_ROWS_LOOKED_AT)
        else:
            click.echo(
                f"note: {key}.name: there is no {source.name} on this machine, so no row was looked at", err=True
            )
