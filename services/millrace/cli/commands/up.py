"""`millrace up`: the one-machine stack, running until Ctrl-C."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from millrace.cli.errors import Interrupted
from millrace.cli.options import DEFAULT_DIRECTORY, DEFAULT_LISTEN

if TYPE_CHECKING:
    from millrace.cli.interrupts import Interrupts
    from millrace.local.stack import StackOptions


@click.command()
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=DEFAULT_DIRECTORY, show_default=True)
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, help="host:port of the orchestrator.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Engine's HTTP API.")
@click.option(
    "--dashboard-port", type=click.IntRange(1, 65535), default=None, help="Port of the dashboard; else a free one."
)
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"])
)
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default="embedded",
    show_default=True,
    envvar="MILLRACE_ENGINE",
    help="Inference engine; flags of vLLM come from MILLRACE_VLLM_FLAGS.",
)
@click.option("--restart/--no-restart", default=True, help="Start again what dies (default), or stop with it.")
@click.option(
    "--liveness/--no-liveness",
    default=True,
    help="Kill what does not answer for 30 s (default), or leave it (debuggers).",
)
def up(
    directory: Path,
    listen: str,
    http_port: int,
    dashboard_port: int | None,
    log_level: str,
    engine: str,
    restart: bool,
    liveness: bool,
) -> None:
    """Run the one-machine stack until Ctrl-C.

    Redis, object store, orchestrator, env-server, inference, trainer. Its data is under --dir and is there again when
    the stack is started again. A process that dies is started again, and runs go on. vLLM gets the first GPU, the
    trainer one rank on each other one; of one GPU vLLM takes 0.4.
    """
    from millrace.cli import interrupts
    from millrace.cli.connection import check_address, environ
    from millrace.local import gpus
    from millrace.local.gpus import flags_on_shared_gpu
    from millrace.local.stack import StackOptions
    from millrace.telemetry.settings import Settings

    check_address(listen, option="--listen")
    settings = Settings.from_env(environ())
    assigned = gpus.assign(gpus.training_gpus(), engine_size=1 if engine == "vllm" else 0)
    is_shared = engine == "vllm" and gpus.are_shared(assigned)
    flags = flags_on_shared_gpu(os.environ.get("MILLRACE_VLLM_FLAGS", ""))
    options = StackOptions(
        directory=directory,
        listen=listen,
        http_port=http_port,
        dashboard_port=dashboard_port,
        log_level=log_level,
        engine=engine,
        engine_environ={"MILLRACE_VLLM_FLAGS": flags} if is_shared else {},
        gpus=assigned,
        is_restarting=restart,
        has_liveness=liveness,
    ).with_settings(settings)

    try:
        interrupts.run(lambda signals: _serve(options, signals))
    except Interrupted:
        again = shlex.join(restart_command(click.get_current_context()))
        click.echo(f"stopped. Its runs are in {directory} and go on with the next `{again}`", err=True)
        raise


async def _serve(options: "StackOptions", signals: "Interrupts") -> None:
    """Start the stack, print its addresses, and wait until the command is interrupted or the stack fails."""
    import asyncio

    from millrace.local.stack import LocalStack

    def note(text: str) -> None:
        click.echo(text, err=True)

    note(f"starting the stack in {options.directory}; process logs: {options.directory / 'logs'}")
    async with LocalStack(options, note=note) as stack:
        signals.on_second(stack.supervisor.skip_grace.set)
        try:
            await stack.start()
            click.echo(f"ready. The orchestrator listens on {stack.address}, the engine on {stack.http_url}")
            click.echo(f"  export MILLRACE_SERVER={stack.address}")
            click.echo("  millrace rl @ examples/reverse_text/rl.toml     millrace run list     Ctrl-C here stops it")
            click.echo(f"The dashboard is at {stack.dashboard_url}; `millrace dashboard` opens it")
            await stack.guard(asyncio.Event().wait())
        except asyncio.CancelledError:
            note("stopping the stack; a second Ctrl-C skips the wait")
            raise


def restart_command(context: click.Context) -> list[str]:
    """Return the command line that starts the same stack again: `millrace up` with the options of this call's line.

    What came from variables is left out, since the next call has them, too.
    """
    words = ["millrace", "up"]
    for option in context.command.params:
        if option.name is None or context.get_parameter_source(option.name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[option.name]
        if isinstance(value, bool):
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            words += [option.opts[0], str(value)]
    return words
