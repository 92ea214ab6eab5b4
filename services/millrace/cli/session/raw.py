"""A click command that leaves its arguments to the config loader, which knows every key."""

import click


class RawCommand(click.Command):
    """Passes all arguments untouched as the parameter `arguments`; only `--help` is click's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help, or take the arguments as they are: click would read `-1` as an option."""
        if "--help" in args or args == ["-h"]:
            return super().parse_args(ctx, ["--help"])
        ctx.params["arguments"] = tuple(args)
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What stands behind the command's name in its usage line."""
        return ["@ FILE [@ FILE ...]", "[--KEY VALUE ...]", "[OPTIONS]"]


OPTIONS_HELP = """\b
Options:
  --KEY VALUE     Any key of the config, such as --trainer.optim.lr 1e-5; --KEY @ FILE for a whole section.
  --server ADDR   Submit to this orchestrator (also: MILLRACE_SERVER) instead of starting a local stack.
  --name NAME     Name of the run; made up if left out.
  --resume        Go on with the run of that name; --ckpt.resume_step K begins a fork of it at step K.
  --label KEY=VALUE
                  A free label of the run; may be repeated.
  --dry-run       Print the resolved config and do nothing; with --set-only the keys that are set, without defaults.
  --check-environments
                  Load the environments first, on the orchestrator's env-servers or here; also with --dry-run.
  --plain         One line per step also on a terminal.
  --debug         Show tracebacks.
  --token-file, --tls-ca, --insecure
                  For protected servers; see `millrace --help`."""
