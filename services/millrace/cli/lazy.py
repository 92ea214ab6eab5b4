"""A click group whose commands are imported when they run, not when the help is printed."""

import difflib
import importlib
from collections.abc import Mapping

import click


class LazyGroup(click.Group):
    """A group over a table `name -> (module:attribute, one line of help)`."""

    def __init__(self, *args: object, lazy: Mapping[str, tuple[str, str]] | None = None, **options: object) -> None:
        """`lazy` is the table; everything else goes to click."""
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return the command."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands with their lines of help, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click, with a did-you-mean."""
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)
