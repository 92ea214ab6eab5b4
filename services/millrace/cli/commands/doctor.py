"""`millrace doctor`."""

from pathlib import Path
from typing import Any

import click

_DEFAULT_STEP_S = 60.0


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--server", metavar="ADDR", help="host:port of the orchestrator; else MILLRACE_SERVER, else 127.0.0.1:50051."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Directory of the stack that listens there; else it is looked for below outputs.",
)
@click.option("--plan", "is_plan", is_flag=True, help="Instead say what a run of the config `@ FILE` will take.")
@click.option("--step-seconds", metavar="N", type=float, default=_DEFAULT_STEP_S, help="A step's duration, else 60.")
@click.option("--tokens", metavar="N", type=int, help="Tokens of a rollout, else orchestrator.seq_len.")
@click.option("--replicas", metavar="N", type=click.IntRange(min=0), default=1, help="Replicas of the engine, else 1.")
@click.option(
    "--parameters", metavar="N", type=click.FloatRange(min=0), default=0.0, help="Billions of parameters of the policy."
)
@click.option(
    "--env-seconds",
    metavar="N",
    type=click.FloatRange(min=0),
    default=0.0,
    help="The environment's CPU s for a rollout.",
)
@click.option("--cores", metavar="N", type=int, default=8, help="Processors of an env-server's machine, else 8.")
@click.option("--redis-gb", metavar="N", type=float, default=64.0, help="Memory of Redis's machine, GB, else 64.")
@click.option("--network-gbs", metavar="N", type=float, default=10.0, help="Reads of the store, GB/s, else 10.")
@click.option("--json", "as_json", is_flag=True, help="With --plan: print data.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[@ FILE] [--KEY VALUE ...]")
def doctor(server: str | None, directory: Path | None, is_plan: bool, arguments: tuple[str, ...], **load: Any) -> int:
    """Check that API, Redis and object store are fit for runs.

    Redis and the object store are those of MILLRACE_REDIS_URL and MILLRACE_STORE_URL, as in the containers of a
    deployment, or those of the stack that runs here. Writes and removes a few small objects.
    Exits 0 if all is well, else 5.

    With --plan nothing is asked: `millrace doctor --plan @ rl.toml --step-seconds 300 --replicas 8` prints how many
    env-servers and orchestrators a run needs, what it takes of Redis, store and network, and what breaks first. Exits
    1 if that does not go.
    """
    if is_plan:
        return _plan(arguments, **load)
    if arguments:
        raise click.UsageError(f"No such option or argument: {arguments[0]}; a config belongs to --plan")
    import asyncio

    from millrace.cli.connection import server_address
    from millrace.cli.doctor import examine

    findings = asyncio.run(examine(*server_address(server), directory=directory))
    marks = {True: "ok", False: "FAILED", None: "–"}
    for finding in findings:
        click.echo(f"{marks[finding.is_good]:<7} {finding.what:<13} {finding.text}")
        if finding.remedy and finding.is_good is False:
            click.echo(f"{'':<21} remedy: {finding.remedy}")
    return 5 if any(finding.is_good is False for finding in findings) else 0


def _plan(arguments: tuple[str, ...], *, as_json: bool, **load: Any) -> int:
    """Print the plan of the config in the arguments; return 1 if a resource does not suffice.

    `load` are the numbers of the options by their names.
    """
    from millrace.cli.doctor import RunLoad, plan_run
    from millrace.cli.session.config_file import explained, require_file_or_model
    from millrace.config import RLConfig
    from millrace.config.load import load as load_config

    for name in ("step_seconds", "tokens", "cores", "redis_gb", "network_gbs"):
        if load[name] is not None and not 0 < load[name] < float("inf"):
            raise click.UsageError(f"--{name.replace('_', '-')} must be a number above 0")
    example = "millrace doctor --plan @ examples/reverse_text/rl.toml --step-seconds 300 --replicas 8"
    with explained(arguments, command="rl", example=example):
        loaded = load_config(RLConfig, arguments)
    require_file_or_model(loaded, example=example)
    tokens = load.pop("tokens") or loaded.config.orchestrator.seq_len
    found = plan_run(loaded.config, RunLoad(rollout_tokens=tokens, **load))
    if as_json:
        import json

        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        click.echo("\n".join(found.render()))
    return 1 if found.first_limit.share > 1 else 0
