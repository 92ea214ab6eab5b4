"""`millrace rl`: one RL run from a config to a summary."""

from contextlib import nullcontext

import click

from millrace.cli.session.raw import OPTIONS_HELP, RawCommand


@click.command(cls=RawCommand, epilog=OPTIONS_HELP)
def rl(arguments: tuple[str, ...]) -> int:
    """Train with reinforcement learning.

    Starts the local stack for the run and tears it down afterwards; with --server or MILLRACE_SERVER it submits the
    run there and follows it (Ctrl-C detaches, and the run continues).
    """
    from millrace.cli.session.dry_run import print_config
    from millrace.cli.session.prepare import prepare, warn_of_wandb

    prepared = prepare(arguments)
    warn_of_wandb(prepared.config)
    if prepared.is_checked:
        from millrace.cli import interrupts
        from millrace.cli.session.environment_check import check_environments

        interrupts.run(lambda signals: check_environments(prepared, server=prepared.server))
    if prepared.is_dry_run:
        print_config(prepared.config)
        return 0
    from millrace.cli import interrupts
    from millrace.cli.address import explain_unreachable
    from millrace.cli.session.results import summary_lines
    from millrace.cli.session.run_session import run_local, run_remote

    flow = run_local if prepared.server is None else run_remote
    explained = explain_unreachable(prepared.server_origin, prepared.server) if prepared.server else nullcontext()
    with explained:
        data, path = interrupts.run(lambda signals: flow(prepared, signals))
    click.echo("\n".join(["", *summary_lines(data), str(path)]))
    return 0
