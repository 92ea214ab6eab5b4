"""`--dry-run`: the resolved config, as it would be submitted."""

import json

import click

from millrace.config.schema import EvalRunConfig, RLConfig, SFTConfig


def print_config(config: RLConfig | SFTConfig | EvalRunConfig) -> None:
    """Print every key with its value as JSON (TOML cannot say null) on standard output."""
    click.echo(json.dumps(json.loads(config.resolved_json()), indent=2))
