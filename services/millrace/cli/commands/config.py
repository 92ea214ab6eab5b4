"""`millrace config`: files of prime-rl and of TRL in Millrace's own words."""

from pathlib import Path

import click


@click.group(name="config", context_settings={"help_option_names": ["-h", "--help"]})
def config() -> None:
    """Work with config files."""


@config.command(name="import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option(
    "--as",
    "kind",
    type=click.Choice(["rl", "sft", "eval", "trainer", "orchestrator", "inference"]),
    help="What the files are, where their keys and names do not tell.",
)
@click.option("--out", "-o", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write it here.")
def import_files(files: tuple[str, ...], kind: str | None, out: Path | None) -> int:
    """Translate config files of prime-rl (September 2025 to October 2026) into one of Millrace.

    Or one of TRL's GRPO or SFT trainer: YAML, JSON, or a script that calls GRPOConfig or SFTConfig, which is read and
    not run. What TRL takes where its file is silent is written out.

    Several files are parts of one run, as in `rl --trainer @ … --orchestrator @ …`. The result is printed, or written
    to --out; standard error says of every key what became of it. Nothing is written if a key has no meaning here.
    """
    from millrace.cli.errors import CliError
    from millrace.cli.session.config_file import import_config, say_notes

    if out is not None and out.exists():
        raise CliError(f"{out} exists", hint="name another file with --out: nothing is overwritten")
    text, notes, how = import_config(files, kind=kind, out=out)
    say_notes(notes)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    click.echo(f"run it: {how}", err=True)
    return 0
