"""`millrace sft`: supervised fine-tuning in one trainer process on this machine."""

import click

from millrace.cli.session.raw import RawCommand

_HELP = """\b
Options:
  --KEY VALUE     Any key of the config, such as --optim.lr 1e-3.
  --dry-run       Print the resolved config and do nothing.
  --debug         Show tracebacks."""


@click.command(cls=RawCommand, epilog=_HELP)
def sft(arguments: tuple[str, ...]) -> int:
    """Fine-tune a model on prompts and completions, on this machine; Ctrl-C stops it."""
    from millrace.cli.session.config_file import refuse_check, require_file_or_model
    from millrace.cli.session.dry_run import print_config
    from millrace.cli.session.model_path import check_models
    from millrace.cli.session.notes import refuse_blocked, say_notes
    from millrace.config.load import load
    from millrace.config.schema import SFTConfig

    loaded = load(SFTConfig, arguments)
    refuse_check(loaded)
    say_notes(loaded.notes)
    if loaded.flags.get("dry-run"):
        print_config(loaded.config)
        return 0
    refuse_blocked(loaded.notes)
    require_file_or_model(loaded, example="millrace sft @ examples/reverse_text/sft.toml")
    names = {"model.name": loaded.config.model.name}
    check_models(names, sources=loaded.sources, output_dir=loaded.config.output_dir, sft_hint=False)

    from millrace.cli import interrupts
    from millrace.cli.session.fine_tune import fine_tune

    return interrupts.run(lambda signals: fine_tune(loaded.config, signals))
