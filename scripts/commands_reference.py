"""`docs/commands.md`, made from the commands themselves. This script prints it; a test compares."""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

import click

from millrace.cli.main import cli

_INTRODUCTION = """# Commands

<!-- Made by `python scripts/commands_reference.py > docs/commands.md`; a test fails where the two differ. -->

What `millrace COMMAND --help` prints, on one page. `--debug` shows tracebacks and may stand anywhere, as may these
options of a protected server:

```text
{access}
```

Exit codes: 0 done; 1 an internal error, or a run that failed or was cancelled; 2 the input is wrong (arguments, config,
names); 3 something is not there; 4 not allowed; 5 something does not answer (another try may help); 130 interrupted.
Keys of configs are in [`configuration.md`](configuration.md), events in [`events.md`](events.md).
"""

_WIDTH = 100


def render() -> str:
    """The whole page."""
    text = _INTRODUCTION.format(access=textwrap.dedent((cli.epilog or "").partition("line):\n")[2]).rstrip())
    for path, command, context in _commands(cli, "millrace", None):
        text += _page(path, command, context)
    return text


def _commands(
    command: click.Command, path: str, parent: click.Context | None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its path, groups before what they hold."""
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent, terminal_width=_WIDTH)
    if parent is not None:
        yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _commands(inner, f"{path} {name}", context)


def _page(path: str, command: click.Command, context: click.Context) -> str:
    """One command: usage, what it does, its options."""
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    text = f"\n{'#' * len(path.split())} {path}\n\n```text\n{usage}\n```\n\n{_prose(command.help or '')}\n"
    if options := _options(command, context):
        text += f"\n```text\n{options}\n```\n"
    return text


def _prose(help_text: str) -> str:
    """A docstring as paragraphs."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(help_text).replace("``", "`"))
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _options(command: click.Command, context: click.Context) -> str:
    """The options that click knows, and what a command that reads its own arguments says of them."""
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    records = [option.get_help_record(context) for option in options]
    own = [record for record in records if record is not None and not record[0].startswith(("-h,", "--help"))]
    formatter = click.HelpFormatter(width=_WIDTH)
    if own:
        formatter.write_dl(own)
    lines = textwrap.dedent(formatter.getvalue()).rstrip()
    epilog = (command.epilog or "").replace("\b\n", "").removeprefix("Options:\n")
    blocks = [textwrap.dedent(block).strip("\n") for block in epilog.split("\n\n")]
    return "\n".join(each for each in (lines, "\n\n".join(blocks)) if each)


if __name__ == "__main__":
    sys.stdout.write(render())
