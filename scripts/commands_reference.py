"""`docs/commands.md`, made from the commands themselves. This script prints it; a test compares."""

import inspect
import re
import sys
from collections.abc import Iterator

import click
from configuration_reference import wrapped

from millrace.cli.main import cli

_INTRODUCTION = """# Commands

<!-- Made by `python scripts/commands_reference.py > docs/commands.md`; a test fails where the two differ. -->
"""

_ANYWHERE = (
    "`millrace COMMAND --help` has the options and more, `millrace --help` those of every command: {access}, and "
    "`--debug` for tracebacks. Exit codes: 0 done; 1 an internal error, or a run that failed or was cancelled; 2 wrong "
    "input (arguments, config, names); 3 not there; 4 not allowed; 5 no answer (another try may help); 130 interrupted."
)
_ARGUMENTS = (
    "`RUN` is a name, the beginning of one, a uid, or `-` for the newest run. `@ FILE` may be repeated, and followed "
    "by any key of [the config](configuration.md) as `--KEY VALUE`."
)
_REPEATED = " [@ FILE ...] [--KEY VALUE ...]"
"""What follows `@ FILE` in the usage of most commands."""


def render() -> str:
    """Return the whole page."""
    access = ", ".join(f"`{option}`" for option in re.findall(r"^ *(--[\w-]+)", cli.epilog or "", re.MULTILINE))
    rows = (
        _row(path, command, context)
        for path, command, context in _commands(cli, "millrace", None)
        if not isinstance(command, click.Group)
    )
    paragraphs = (wrapped(text, indent="") for text in (_ANYWHERE.format(access=access), _ARGUMENTS))
    return "\n".join((_INTRODUCTION, *paragraphs, "".join(rows)))


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
    pieces = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "").replace(_REPEATED, "")
    about = _first_sentence(command.help or "")
    return wrapped(f"* `{' '.join((path, *pieces.split()))}`: {about}")


def _first_sentence(help_text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = re.split(r"\n\s*\n", inspect.cleandoc(help_text))[0].replace("``", "`")
    return re.split(r"(?<=\.) ", " ".join(paragraph.split()))[0]


if __name__ == "__main__":
    sys.stdout.write(render())
