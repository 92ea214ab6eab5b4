"""`millrace eval`: environments played with a fixed model, and what came out of it."""

import click

from millrace.cli.options import RawCommand

_HELP = """\b
Options:
  --environment-ids A,B
                  Environments, instead of [[env]] in a file; they are played in parallel.
  --run RUN       Evaluate the policies of this run (name, uid or directory of results; LoRA is merged into its base).
  --weights-dir DIR
                  Evaluate DIR/step_N, Hugging Face directories or LoRA adapters on top of model.name.
  --steps 10,20   Of --run or --weights-dir only these steps.
  --no-eval-base  Leave the base model out.
  --store URL     Object store of --run; else outputs/RUN/store, MILLRACE_STORE_URL, outputs/local/store.
  --endpoints-path PATH
                  endpoints.toml (or endpoints.py) whose alias model.name is; else configs/ and here.
  --resume        With --name: go on with an evaluation that was interrupted.
  --KEY VALUE     Any key of the config, such as --num-examples 20 or --client.base-url https://host/v1.
  --server ADDR   Submit to this orchestrator (also: MILLRACE_SERVER) instead of starting a local stack.
  --name NAME     Name of the run; made up if left out.
  --dry-run       Print the resolved config and do nothing.
  --plain         Plain lines also on a terminal.
  --debug         Show tracebacks."""


class _EvalCommand(RawCommand):
    """A `RawCommand` that leaves the help of `eval show` to that subcommand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep all arguments as they are if the first is `show`; otherwise parse them as `RawCommand` does."""
        if args[:1] != ["show"]:
            return super().parse_args(ctx, args)
        ctx.params["arguments"] = tuple(args)
        return []


@click.command(name="eval", cls=_EvalCommand, epilog=_HELP)
def evaluate(arguments: tuple[str, ...]) -> int:
    """Evaluate a model, or the policies of a run, on environments.

    With [client] the model is served by an OpenAI-compatible endpoint; the API key is read from the environment
    variable that client.api_key_var names. Without it model.name is a directory, which the local stack serves.

    `millrace eval show RUN` shows the prompts, replies and rewards of evaluations alone, also of a run that trains;
    `millrace eval show --help` lists filters.
    """
    if arguments[:1] == ("show",):
        from millrace.cli.commands.run.samples import samples

        # An option that is given again wins: `--purpose train` shows training rollouts all the same.
        return samples.main(
            ["--purpose", "eval", *arguments[1:]], prog_name="millrace eval show", standalone_mode=False
        )
    from millrace.cli.evals.prepare import prepare_eval
    from millrace.cli.session.prepare import print_config

    prepared = prepare_eval(arguments)
    if prepared.is_dry_run:
        from millrace.cli.session.environment_check import require_installed

        require_installed(prepared.config.env if prepared.server is None else (), "env")
        print_config(prepared.config)
        return 0
    from contextlib import nullcontext

    from millrace.cli import interrupts
    from millrace.cli.connection import explain_unreachable
    from millrace.cli.evals.session import evaluate_here, evaluate_there, table

    if prepared.policies:
        from millrace.cli.evals.session import evaluate_policies

        data, path = evaluate_policies(prepared)
        click.echo("\n".join(["", *table(data), str(path)]))
        return 0
    flow = evaluate_here if prepared.server is None else evaluate_there
    explained = explain_unreachable(prepared.server_origin, prepared.server) if prepared.server else nullcontext()
    with explained:
        data, path = interrupts.run(lambda signals: flow(prepared, signals))
    click.echo("\n".join(["", *table(data), str(path)]))
    return 0
