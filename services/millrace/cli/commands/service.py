"""`millrace orchestrator`, `millrace trainer`, `millrace env-server`: one service in the foreground."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.options import RawCommand
from millrace.cli.session.service_start import options_help

if TYPE_CHECKING:
    from millrace.config.load import Loaded


def _command(name: str, about: str) -> click.Command:
    """Return the command that runs the service `name` in the foreground; `about` is the text of its help."""

    def run(arguments: tuple[str, ...]) -> int:
        """Run the service, or its bench, or with `--dry-run` print its config; return the exit code."""
        import os

        from millrace.cli.session.bench import is_bench
        from millrace.cli.session.service_start import SERVICES, load_service, start_service

        if name == "orchestrator" and "--bench" in arguments:
            return _bench_orchestrator(arguments)
        service = SERVICES[name]
        loaded = load_service(service, arguments, os.environ)
        benches = is_bench(loaded.flags)
        if loaded.flags.get("dry-run"):
            from millrace.cli.session.prepare import print_config

            print_config(loaded.config)
            return 0
        if benches:
            return _bench(name, loaded)
        start_service(service, loaded, os.environ)
        return 0

    return RawCommand(name, callback=run, help=about, epilog=options_help(name))


def _bench(name: str, loaded: "Loaded[Any]") -> int:
    """Run the trainer's bench and return the exit code. Raises CliError for any service but the trainer."""
    from millrace.cli import interrupts
    from millrace.cli.errors import CliError
    from millrace.cli.session.bench import run_bench, trainer_bench
    from millrace.cli.session.prepare import check_models

    if name != "trainer":
        raise CliError(
            f"--bench does not measure the {name} alone: it waits for engines",
            hint="millrace orchestrator --bench measures it with the engine and the loop around both",
        )
    trainer = loaded.config.trainer
    check_models(
        {"trainer.model.name": trainer.model.name}, sources=loaded.sources, output_dir="outputs", sft_hint=True
    )
    asked = trainer_bench(trainer, loaded.flags)
    wandb = loaded.config.wandb
    return interrupts.run(lambda signals: run_bench(asked, signals, output_dir="outputs", wandb=wandb))


def _bench_orchestrator(arguments: Sequence[str]) -> int:
    """Run the orchestrator's bench on a stack started for it, and return the exit code.

    With `--dry-run` only print the config.
    """
    from millrace.cli import interrupts
    from millrace.cli.session.orchestrator_bench import bench_orchestrator
    from millrace.cli.session.prepare import print_config
    from millrace.cli.session.service_start import bench_run

    prepared = bench_run(arguments)
    if prepared.is_dry_run:
        print_config(prepared.config)
        return 0
    return interrupts.run(lambda signals: bench_orchestrator(prepared, signals))


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
