"""`millrace orchestrator`, `millrace trainer`, `millrace env-server`: one service in the foreground."""

import click

from millrace.cli.session.raw import RawCommand
from millrace.cli.session.service_start import SERVICES, load_service, options_help, start_service


def _command(name: str, about: str) -> click.Command:
    def run(arguments: tuple[str, ...]) -> int:
        import os

        service = SERVICES[name]
        loaded = load_service(service, arguments, os.environ)
        if loaded.flags.get("dry-run"):
            from millrace.cli.session.dry_run import print_config

            print_config(loaded.config)
            return 0
        start_service(service, loaded, os.environ)
        return 0

    return RawCommand(name, callback=run, help=about, epilog=options_help(name))


orchestrator = _command(
    "orchestrator",
    """Run the orchestrator until Ctrl-C.

    It takes runs (`millrace run submit`), and drives them on the workers that register with it. A file is checked as
    the orchestrator's part of a run.""",
)
trainer = _command(
    "trainer",
    """Run one trainer until Ctrl-C; several ranks with torchrun.

    It registers with the orchestrator and trains its runs. A file is checked as the trainer's part of a run.""",
)
env_server = _command(
    "env-server",
    """Run one env-server until Ctrl-C.

    It registers with the orchestrator and plays the environments of its runs, which have to be installed here.""",
)
