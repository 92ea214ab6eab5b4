"""`docs/commands.md`, made from the commands themselves. This script prints it; a test compares."""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

import click
from configuration_reference import wrapped

from millrace.cli.main import cli

_INTRODUCTION = """# Commands

<!-- Made by `python scripts/commands_reference.py > docs/commands.md`; a test fails where the two differ. -->

`millrace COMMAND --help` has the options and more. Anywhere on a command line, for a protected server:

```text
{access}
```

`--debug` shows tracebacks. Exit codes: 0 done; 1 an internal error, or a run that failed or was cancelled; 2 wrong
input (arguments, config, names); 3 not there; 4 not allowed; 5 no answer (another try may help); 130 interrupted. `RUN`
is a name, the beginning of one, a uid, or `-` for the newest run. `--KEY VALUE` is any key of
[the config](configuration.md).

"""


def render() -> str:
    """Return the whole page."""
    access = textwrap.dedent((cli.epilog or "").partition("line):\n")[2]).rstrip()
    rows = (
        _row(path, command, context)
        for path, command, context in _commands(cli, "millrace", None)
        if not isinstance(command, click.Group)
    )
    return _INTRODUCTION.format(access=access) + "".join(rows)


def _commands(
    command: click.Command, path: str, parent: click.Context | None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield every command with its path, groups before what they hold."""
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    if parent is not None:
        yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _commands(inner, f"{path} {name}", context)


def _row(path: str, command: click.Command, context: click.Context) -> str:
    """Return the item of one command."""
    pieces = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "")
    about = _first_paragraph(command.help or "")
    return wrapped(f"* `{' '.join((path, *pieces.split()))}`: {about}")


def _first_paragraph(help_text: str) -> str:
    """Return how a docstring begins, on one line."""
    return " ".join(re.split(r"\n\s*\n", inspect.cleandoc(help_text))[0].replace("``", "`").split())


if __name__ == "__main__":
    sys.stdout.write(render())
