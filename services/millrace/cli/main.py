"""The entry point of the `millrace` command.

This module imports only click and the error classes; each command imports what it needs when it runs. A test checks
that `millrace --help` imports neither torch nor grpc nor pydantic nor rich.
"""

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence

import click

import millrace
from millrace.cli.connection import HELP, take_options
from millrace.cli.early_interrupts import listen_early, remembered
from millrace.cli.errors import EXIT_USAGE, Interrupted, report

_COMMANDS = {
    "rl": ("millrace.cli.commands.rl:rl", "Train with reinforcement learning: millrace rl @ rl.toml"),
    "sft": ("millrace.cli.commands.sft:sft", "Fine-tune on prompts and completions: millrace sft @ sft.toml"),
    "estimate": (
        "millrace.cli.commands.estimate:estimate",
        "Say what a run takes of GPU memory and time: millrace estimate @ rl.toml",
    ),
    "inference": (
        "millrace.cli.commands.inference:inference",
        "Run one inference replica: millrace inference @ infer.toml",
    ),
    "orchestrator": ("millrace.cli.commands.service:orchestrator", "Run the orchestrator: waits for runs."),
    "trainer": ("millrace.cli.commands.service:trainer", "Run one trainer: waits for runs of its orchestrator."),
    "env-server": ("millrace.cli.commands.service:env_server", "Run one env-server: plays environments."),
    "tinker": ("millrace.cli.commands.tinker:tinker", "Serve the public Tinker SDK: millrace tinker --model DIR"),
    "merge": ("millrace.cli.commands.tools:merge", "Merge an adapter of PEFT into its base: millrace merge ADAPTER …"),
    "config": ("millrace.cli.commands.tools:config", "Translate config files of prime-rl."),
    "eval": ("millrace.cli.commands.eval:evaluate", "Evaluate a fixed model or an endpoint: millrace eval @ eval.toml"),
    "up": ("millrace.cli.commands.up:up", "Start the one-machine stack and leave it running."),
    "dashboard": ("millrace.cli.commands.dashboard:dashboard", "Open the dashboard of a stack or a deployment."),
    "run": ("millrace.cli.commands.run.group:run", "Submit, list, show, watch and cancel runs; ask why one waits."),
    "env": ("millrace.cli.commands.env_check:env", "Try an environment before a run needs it: millrace env check ID"),
    "doctor": ("millrace.cli.commands.doctor:doctor", "Check that API, Redis and object store are fit for runs."),
    "token": ("millrace.cli.commands.tools:token", "Make bearer tokens for protected servers."),
    "version": ("millrace.cli.commands.tools:version", "Show the versions of Millrace and of what it stands on."),
}

_EPILOG = f"""\b
Try:
  millrace sft @ examples/reverse_text/sft.toml
  millrace rl @ examples/reverse_text/rl.toml

{HELP}"""


# A click group whose commands are imported when they run, not when the help is printed.


class LazyGroup(click.Group):
    """A click group defined by a table `name -> (module:attribute, one line of help)`.

    A command is imported when it runs, not when the help is printed.
    """

    def __init__(self, *args: object, lazy: Mapping[str, tuple[str, str]] | None = None, **options: object) -> None:
        """Create the group; `lazy` is the table of commands, all other arguments are click's."""
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command, and return the command."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the section of commands and their help lines, without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does; suggest the nearest name for an unknown one."""
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


_ABOUT = "Millrace: asynchronous reinforcement learning of language models. Rollouts stream in; the policy turns."


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    help=_ABOUT,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--debug", is_flag=True, help="Show tracebacks and request ids of errors.")
@click.version_option(millrace.__version__, prog_name="millrace")
def cli(debug: bool) -> None:
    """Hold the commands of `millrace`; `debug` is read by `main`, because it may be anywhere in the command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. All errors become messages here."""
    listen_early()
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in arguments
    try:
        # `--debug` may be anywhere, because one adds it after something went wrong.
        words = take_options([word for word in arguments if word != "--debug"])
        code = cli.main(words, prog_name="millrace", standalone_mode=False)
    except click.exceptions.Abort:
        return 130
    # A kind of UsageError, whose message is the whole help.
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return EXIT_USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "millrace"
        print(f"Error: {error.format_message()}\n  remedy: see {where} --help", file=sys.stderr)
        return EXIT_USAGE
    except click.ClickException as error:
        print(f"Error: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the process edge: everything becomes a message
        # A library whose import a Ctrl-C broke off may say so with an error of its own.
        caused_by = Interrupted(remembered[0]) if remembered else error
        return report(caused_by, is_debug=is_debug)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
