"""`--dry-run`: the resolved config, as it would be submitted."""

import json

import click

from millrace.config.section import Document


def print_config(config: Document) -> None:
    """Print every key with its value as JSON (TOML cannot say null) on standard output."""
    click.echo(json.dumps(json.loads(config.resolved_json()), indent=2))
