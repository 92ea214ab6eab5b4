"""`millrace run panes RUN`: a terminal pane for each component of a run, in tmux."""

import os
import shlex
import shutil
import subprocess
import sys

import click

from millrace.cli.errors import CliError
from millrace.cli.log_files import COMPONENTS, LEVELS
from millrace.cli.options import RUN, SERVER

START_S = 10.0


@click.command()
@RUN
@click.option("--level", type=click.Choice(LEVELS), help="Of the components only lines of this level and worse.")
@click.option("--detach", is_flag=True, help="Only start the session, and print how to attach to it.")
@SERVER
def panes(name: str, level: str | None, detach: bool, server: str | None) -> None:
    """Open a tmux session with a pane for the run's steps and one for what each of its services writes.

    It shows `millrace run watch` and `millrace run logs --component NAME --follow`. Ctrl-B D leaves it, and the run
    goes on; it is there already if it was opened before.
    """
    tmux = shutil.which("tmux")
    if tmux is None:
        raise CliError(
            "tmux is not installed here, and it is what draws the panes",
            hint=f"install it (apt install tmux), or see one: millrace run logs {name} --component trainer -f",
        )
    session = "millrace-" + "".join(char if char.isalnum() else "-" for char in name.removeprefix("runs/"))
    where = _reached(server)
    shown = [] if level is None else ["--level", level]
    watching = ["watch", name, "--plain", *where]
    commands = [watching] + [["logs", name, "--component", each, "-f", *shown, *where] for each in COMPONENTS]
    if _tmux(tmux, "has-session", "-t", f"={session}", is_asked=True) != 0:
        first, *others = (_shell(words) for words in commands)
        _tmux(tmux, "new-session", "-d", "-s", session, "-c", os.getcwd(), "-x", "200", "-y", "50", first)
        for each in others:
            _tmux(tmux, "split-window", "-c", os.getcwd(), "-t", f"={session}:", each)
            _tmux(tmux, "select-layout", "-t", f"={session}:", "tiled")
    attach = ["switch-client" if "TMUX" in os.environ else "attach-session", "-t", f"={session}"]
    if detach or not sys.stdout.isatty():
        click.echo(shlex.join(["tmux", "attach-session", "-t", session]))
        return
    os.execv(tmux, [tmux, *attach])


def _reached(server: str | None) -> list[str]:
    """Return the options that reach the same server: panes have tmux's environment, which may be an older one."""
    from millrace.cli.connection import OPTIONS, environ

    known = environ()
    address = server or known.get("MILLRACE_SERVER")
    options = [] if not address else ["--server", address]
    for option, variable in OPTIONS.items():
        options += [option, known[variable]] if known.get(variable) else []
    return options + (["--insecure"] if known.get("MILLRACE_INSECURE") else [])


def _shell(words: list[str]) -> str:
    """Return the command of a pane, which stays until a key is pressed, because its last lines say how it ended."""
    command = shlex.join([sys.executable, "-m", "millrace.cli", "run", *words])
    return f"{command}; printf '(ended; Enter closes)'; read _"


def _tmux(tmux: str, *words: str, is_asked: bool = False) -> int:
    """Have tmux do it; CliError with what it says where it does not, unless the exit code is what is asked for."""
    try:
        done = subprocess.run([tmux, *words], capture_output=True, text=True, timeout=START_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CliError(f"tmux has not answered within {START_S:.0f} s", hint="see whether `tmux ls` does") from error
    if done.returncode != 0 and not is_asked:
        raise CliError(f"tmux {words[0]}: {done.stderr.strip() or done.returncode}", hint="see `tmux ls`")
    return done.returncode
