"""`millrace version`."""

import importlib.metadata
import platform

import click

import millrace

_PACKAGES = ("grpcio", "protobuf", "pydantic", "redis", "verifiers", "torch", "transformers", "vllm")


@click.command()
def version() -> None:
    """Show the versions of Millrace and of what it stands on."""
    click.echo(f"millrace {millrace.__version__}   python {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        try:
            click.echo(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            click.echo(f"  {name} (not installed)")
