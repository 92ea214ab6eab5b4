"""From a command line to a checked evaluation, before anything starts."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.cli.address import check_address
from millrace.cli.errors import CliError
from millrace.cli.session.config_file import missing_file, refuse_check
from millrace.cli.session.model_path import check_models, is_path
from millrace.cli.session.new_name import check_new_name
from millrace.cli.session.notes import say_notes
from millrace.config.load import load
from millrace.config.schema import EvalRunConfig
from millrace.errors import InvalidSpecError
from millrace.runlog import run_name
from millrace.telemetry.settings import Settings

EXAMPLE = "millrace eval @ eval.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEval:
    """An evaluation that is ready to be submitted."""

    config: EvalRunConfig
    settings: Settings
    server: str | None
    """host:port of the orchestrator; None starts a local stack."""
    server_origin: str
    name: str
    """Chosen, or made of the first environment and a random tail."""
    is_dry_run: bool
    is_plain: bool


def prepare_eval(arguments: Sequence[str], *, environ: Mapping[str, str] = os.environ) -> PreparedEval:
    """Load and check; InvalidSpecError with everything that is wrong, CliError for what this machine lacks."""
    settings = Settings.from_env(environ)
    try:
        loaded = load(EvalRunConfig, arguments, environ)
    except InvalidSpecError as error:
        if not arguments:
            raise missing_file(EXAMPLE) from error
        raise
    refuse_check(loaded)
    config, flags = loaded.config, loaded.flags
    say_notes(loaded.notes)
    server, origin = settings.server, "MILLRACE_SERVER"
    if "server" in flags:
        server, origin = check_address(str(flags["server"]), option="--server"), "--server"
    name = str(flags.get("name") or config.run.name or "")
    if name:
        check_new_name(name, option="--name" if flags.get("name") else "run.name")
    if not flags.get("dry-run"):
        _check_place(config, server, loaded.sources, environ)
    return PreparedEval(
        config=config,
        settings=settings,
        server=server,
        server_origin=origin,
        name=name or run_name.make(f"eval-{config.env[0].name}", secrets.token_hex(2)),
        is_dry_run=bool(flags.get("dry-run")),
        is_plain=bool(flags.get("plain")),
    )


def _check_place(
    config: EvalRunConfig, server: str | None, sources: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    """A model or an endpoint, and the endpoint's key where this command starts the env-server."""
    if config.client is None:
        if server is not None:
            raise CliError(
                "an evaluation on a server needs an endpoint that serves the model",
                hint="name it with --client.base-url URL, or leave --server out: then a stack is started for the model",
            )
        if not is_path(config.model.name, output_dir=config.output_dir):
            raise CliError(
                f"model.name is {config.model.name!r}, which is no directory, and there is no [client]",
                hint="name a directory with a Hugging Face model, or the endpoint that serves it (--client.base-url)",
            )
        check_models({"model.name": config.model.name}, sources=sources, output_dir=config.output_dir, sft_hint=True)
        return
    variable = config.client.api_key_var
    if variable and server is None and not environ.get(variable):
        raise CliError(
            f"client.api_key_var names {variable}, and that environment variable is not set",
            hint=f"export {variable}=<the endpoint's API key>, or leave client.api_key_var out if it needs none",
        )
