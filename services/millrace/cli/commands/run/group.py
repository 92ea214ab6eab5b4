"""`millrace run`: submit, list, show, watch, logs, cancel, why; each talks to an orchestrator over gRPC."""

import datetime
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from millrace.cli.commands.run.audit import attest, audit, repair, replay
from millrace.cli.commands.run.compare import compare, lineage
from millrace.cli.commands.run.delete import delete
from millrace.cli.commands.run.export import export, export_policy
from millrace.cli.commands.run.fork import fork, pause, resume
from millrace.cli.commands.run.samples import samples
from millrace.cli.commands.run.usage import usage
from millrace.cli.connection import ask_server
from millrace.cli.errors import EXIT_FAILED, CliError
from millrace.cli.log_files import COMPONENTS, LEVELS
from millrace.cli.options import DEFAULT_LISTEN, FORMAT, OPTIONS_HELP, RUN, SERVER, RawCommand

if TYPE_CHECKING:
    from millrace.cli.log_files import LogQuery
    from millrace.cli.offline.ended import EndedRun
    from millrace.cli.view.progress import Progress
    from millrace.client import Client
    from millrace.v1 import event_pb2, run_pb2

CURVES_S = 10.0
"""How long `show` waits for curves, which are a decoration."""


@click.group()
def run() -> None:
    """Submit, list, show, watch and cancel runs; ask why one waits.

    RUN is a name, the beginning of one, a uid, or - for the most recent run.
    """


run.add_command(replay)
run.add_command(fork)
run.add_command(export_policy)
run.add_command(export)
run.add_command(audit)
run.add_command(attest)
run.add_command(repair)
run.add_command(delete)
run.add_command(usage)


# `millrace run panes RUN`: a terminal pane for each component of a run, in tmux.

START_S = 10.0


@click.command()
@RUN
@click.option("--level", type=click.Choice(LEVELS), help="Of the components only lines of this level and worse.")
@click.option("--detach", is_flag=True, help="Only start the session, and print how to attach to it.")
@SERVER
def panes(name: str, level: str | None, detach: bool, server: str | None) -> None:
    """Show a run's steps, and what its services write, in panes of tmux.

    It shows `millrace run watch` and `millrace run logs --component NAME --follow`. Ctrl-B D leaves it, and the run
    goes on; it is there already if it was opened before.
    """
    tmux = shutil.which("tmux")
    if tmux is None:
        raise CliError(
            "tmux is not installed here, and it is what draws the panes",
            hint=f"install it (apt install tmux), or see one: millrace run logs {name} --component trainer -f",
        )
    # tmux reads `.` and `:` as separators in a target, so the name of the session has neither.
    session = "millrace-" + "".join(char if char.isalnum() else "-" for char in name.removeprefix("runs/"))
    where = _reached(server)
    shown = [] if level is None else ["--level", level]
    watching = ["watch", name, "--plain", *where]
    commands = [watching] + [["logs", name, "--component", each, "-f", *shown, *where] for each in COMPONENTS]
    # With `=` tmux compares the whole name; without it another session whose name begins so is found, too.
    if _tmux(tmux, "has-session", "-t", f"={session}", is_asked=True) != 0:
        first, *others = (_shell(words) for words in commands)
        # Without a terminal tmux takes 80×24 characters, which is too small for all panes.
        _tmux(tmux, "new-session", "-d", "-s", session, "-c", os.getcwd(), "-x", "200", "-y", "50", first)
        for each in others:
            _tmux(tmux, "split-window", "-c", os.getcwd(), "-t", f"={session}:", each)
            # After each split, because tmux refuses to split a pane that is too small.
            _tmux(tmux, "select-layout", "-t", f"={session}:", "tiled")
    # Within tmux, `attach-session` is refused.
    attach = ["switch-client" if "TMUX" in os.environ else "attach-session", "-t", f"={session}"]
    if detach or not sys.stdout.isatty():
        click.echo(shlex.join(["tmux", "attach-session", "-t", session]))
        return
    os.execv(tmux, [tmux, *attach])


def _reached(server: str | None) -> list[str]:
    """Return the options with which a pane reaches the same server: address, token file, certificates.

    A pane cannot inherit them: its environment is that of the tmux server, which may have started earlier.
    """
    from millrace.cli.connection import OPTIONS, environ

    known = environ()
    address = server or known.get("MILLRACE_SERVER")
    options = [] if not address else ["--server", address]
    for option, variable in OPTIONS.items():
        options += [option, known[variable]] if known.get(variable) else []
    return options + (["--insecure"] if known.get("MILLRACE_INSECURE") else [])


def _shell(words: list[str]) -> str:
    """Return the shell command of a pane that runs `millrace run` with `words`.

    The command waits for Enter at its end, so that the last lines remain readable.
    """
    command = shlex.join([sys.executable, "-m", "millrace.cli", "run", *words])
    return f"{command}; printf '(ended; Enter closes)'; read _"


def _tmux(tmux: str, *words: str, is_asked: bool = False) -> int:
    """Run a tmux command and return its exit code.

    A failure raises CliError with tmux's message, unless `is_asked`: then the exit code is the answer.
    """
    try:
        done = subprocess.run([tmux, *words], capture_output=True, text=True, timeout=START_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CliError(f"tmux has not answered within {START_S:.0f} s", hint="see whether `tmux ls` does") from error
    if done.returncode != 0 and not is_asked:
        raise CliError(f"tmux {words[0]}: {done.stderr.strip() or done.returncode}", hint="see `tmux ls`")
    return done.returncode


run.add_command(panes)
run.add_command(pause)
run.add_command(resume)
run.add_command(samples)
run.add_command(lineage)
run.add_command(compare)


@run.command(cls=RawCommand, epilog=OPTIONS_HELP + "\n  --follow        Follow the run to its end; Ctrl-C detaches.")
def submit(arguments: tuple[str, ...]) -> int:
    """Submit a run."""
    from millrace.cli import interrupts
    from millrace.cli.connection import explain_unreachable, shared_address
    from millrace.cli.session.prepare import prepare, print_config

    if arguments and os.path.isfile(arguments[0]):
        arguments = ("@", *arguments)
    prepared = prepare(arguments, command="millrace run submit", default_server=shared_address())
    server = prepared.server or DEFAULT_LISTEN
    if prepared.flags.get("bench"):
        hint = "millrace rl --bench, with the same files"
        raise CliError("millrace run submit has no --bench: it measures nothing", hint=hint)
    if prepared.is_checked:
        from millrace.cli import interrupts
        from millrace.cli.session.environment_check import check_environments

        interrupts.run(lambda signals: check_environments(prepared, server=server))
    if prepared.is_dry_run:
        print_config(prepared.config, only=prepared.shown)
        return 0
    from millrace.cli.connection import open_client
    from millrace.cli.session.results import summary_lines
    from millrace.cli.session.run_session import begin_remote, run_remote, submitted_line

    if prepared.is_follow:
        with explain_unreachable(prepared.server_origin, server):
            data, path = interrupts.run(lambda signals: run_remote(prepared, signals))
        click.echo("\n".join(["", *summary_lines(data), str(path)]))
        return 0

    async def create(_: interrupts.Interrupts) -> str:
        """Create the run, and return the line to print."""
        async with open_client(server) as client:
            begun = await begin_remote(client, prepared, note=lambda text: click.echo(text, err=True))
            return submitted_line(begun)

    with explain_unreachable(prepared.server_origin, server):
        click.echo(interrupts.run(create))
    return 0


@run.command(name="list")
@click.option("--state", "states", multiple=True, help="Only runs in this state, such as running; may be repeated.")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="0 is all.")
@click.option("--tenant", default="", help="Only this tenant's runs.")
@FORMAT
@SERVER
def list_runs(states: tuple[str, ...], limit: int, tenant: str, form: str, server: str | None) -> None:
    """List runs, newest first.

    Without a named server, runs of this machine whose own stack has ended are listed, too.
    """
    from millrace.cli.connection import OUTPUTS, is_listening, server_address
    from millrace.cli.offline.ended import list_ended

    wanted = [_state(text) for text in states]
    address, origin = server_address(server)
    is_named = origin in ("--server", "MILLRACE_SERVER")
    found = [] if is_named else list_ended(note=lambda text: click.echo(text, err=True))
    here = [each for each in found if not wanted or each.run.state in wanted]
    here = [each for each in here if not tenant or each.run.tenant == tenant]

    async def show(client: "Client") -> None:
        listed = await client.runs.list(states=wanted, limit=limit, tenant=tenant)
        _print_runs(listed, here, limit=limit, form=form)
        if not listed and not here and form != "json":
            which = f" that are {' or '.join(states)}" if states else ""
            local = "" if is_named else f", and {OUTPUTS}/ here has no run whose own stack has ended"
            begin = "" if states else "; `millrace run submit @ FILE` begins one there"
            where = f"the orchestrator at {address} ({origin}) has none"
            click.echo(f"no runs{which}: {where}{local}{begin}", err=True)

    if here and not is_listening(address):
        click.echo(f"note: no stack runs at {address} ({origin}); these are local runs whose stack has ended", err=True)
        _print_runs([], here, limit=limit, form=form)
    else:
        ask_server(server, show)


def _print_runs(served: "Sequence[run_pb2.Run]", here: "Sequence[EndedRun]", *, limit: int, form: str) -> None:
    """Print the runs of a server (`served`) and the ended local runs (`here`) as one list, newest first.

    A run in both is printed once, as the server knows it. At most `limit` runs are printed, all if `limit` is 0. `form`
    is "json" or "table".
    """
    from millrace.cli.view.output import Paint, runs_json, runs_table

    known = {run.uid for run in served}
    ended = {each.run.uid: each for each in here if each.run.uid not in known}
    runs = [*served, *(each.run for each in ended.values())]
    runs.sort(key=lambda run: run.create_time.ToNanoseconds(), reverse=True)
    runs = runs[:limit] if limit else runs
    directories = {run.uid: str(ended[run.uid].directory) for run in runs if run.uid in ended}
    if form == "json":
        click.echo(runs_json(runs, ended=directories))
    elif runs:
        now = datetime.datetime.now(datetime.UTC)
        click.echo(runs_table(runs, now=now, ended=directories, paint=Paint.of(sys.stdout)))


@run.command()
@RUN
@FORMAT
@SERVER
def show(name: str, form: str, server: str | None) -> None:
    """Show one run; on a terminal with its curves."""
    from millrace.cli.offline.ended import ask_or_read
    from millrace.cli.options import resolve
    from millrace.cli.view.output import Paint, message_json, run_details
    from millrace.cli.view.view import is_fancy

    async def act(client: "Client") -> None:
        """Print the run as the server knows it, with checkpoints and curves."""
        found = await resolve(client.runs, name)
        if form == "json":
            click.echo(message_json(found))
            return
        saved = await client.runs.checkpoints(found.name)
        curves = await _curves(client, found) if is_fancy(sys.stdout, plain=False) else []
        now = datetime.datetime.now(datetime.UTC)
        click.echo(run_details(found, saved, now=now, curves=curves, paint=Paint.of(sys.stdout)))

    def read(ended: "EndedRun") -> None:
        """Print a run whose stack has ended, from its log."""
        if form == "json":
            click.echo(message_json(ended.run))
            return
        now = datetime.datetime.now(datetime.UTC)
        click.echo(run_details(ended.run, [], now=now, paint=Paint.of(sys.stdout)))

    ask_or_read(server, act, read, run=name)


async def _curves(client: "Client", run: "run_pb2.Run") -> list[tuple[str, str]]:
    """Return label and text for each curve of the run.

    If the curves cannot be read now, return one line with the reason.
    """
    import asyncio

    from millrace.cli.view.output import SHOWN_CURVES, curve_lines, eval_curves
    from millrace.decoding import decode_object
    from millrace.errors import MillraceError

    try:
        what = f"the config of {run.name}"
        evals = eval_curves(decode_object(run.config_json or "{}", what=what, reason="CONFIG_UNREADABLE"))
        async with asyncio.timeout(CURVES_S):
            return curve_lines(await client.runs.metrics(run.name, names=[*SHOWN_CURVES, *evals]), evals)
    except TimeoutError:
        return [("curves", f"– (the server has not read them within {CURVES_S:.0f} s)")]
    except MillraceError as error:
        return [("curves", f"– ({error.message})")]


@run.command()
@RUN
@click.option("--plain", is_flag=True, help="One line per step also on a terminal.")
@FORMAT
@SERVER
def watch(name: str, plain: bool, form: str, server: str | None) -> None:
    """Follow a run to its end. Ctrl-C detaches, and the run continues. Exits 1 if it failed or was cancelled.

    With `--format json` each event is one line, and the last line is the summary.
    """
    import json

    from millrace.cli.offline.ended import ask_or_read
    from millrace.cli.options import resolve
    from millrace.cli.session.follow import require_success
    from millrace.cli.session.results import summary_lines, watched_summary
    from millrace.cli.session.run_session import follow_or_detach
    from millrace.cli.view.progress import Progress
    from millrace.cli.view.view import JsonView, make_view
    from millrace.runlog.run_status import is_terminal

    async def act(client: "Client") -> None:
        """Follow the run on the server to its end, and print the summary."""
        found = await resolve(client.runs, name)
        progress = Progress.of(found)
        with JsonView() if form == "json" else make_view(progress, plain=plain, stream=sys.stdout) as view:
            await follow_or_detach(client, progress, view)
        end(progress)
        require_success(progress)

    def read(ended: "EndedRun") -> None:
        """Show the events of a run whose stack has ended, and the summary."""
        progress = Progress.of(ended.run)
        with JsonView() if form == "json" else make_view(progress, plain=True, stream=sys.stdout) as view:
            for event in ended.events:
                progress.apply(event)
                view.show(event)
        end(progress)
        if not is_terminal(progress.state):
            raise CliError(ended.explain(), exit_code=EXIT_FAILED)
        require_success(progress, logs=ended.directory / "logs")

    def end(progress: "Progress") -> None:
        """Print the summary, as JSON or as text."""
        if form == "json":
            click.echo(json.dumps({"summary": watched_summary(progress)}))
        elif progress.steps:
            click.echo("\n".join(["", *summary_lines(watched_summary(progress), with_plot=False)]))

    ask_or_read(server, act, read, run=name)


@run.command()
@RUN
@click.option("-f", "--follow", "is_follow", is_flag=True, help="Go on with what is new until the run ends.")
@click.option(
    "--component", metavar="NAME",
    help="What this service has written instead of the events: orchestrator, env-server, inference or trainer.",
)  # fmt: skip
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=None, help="Of a component: only the last so many lines."
)
@click.option("--all", "is_all", is_flag=True, help="Of a component: also lines that are not this run's.")
@click.option(
    "--level", type=click.Choice(LEVELS), help="Only lines of this level and worse; of events: warnings, and failures."
)
@FORMAT
@SERVER
def logs(name: str, component: str | None, form: str, server: str | None, **options: Any) -> None:
    """Print the events of a run. With --component, print what one of its services has written.

    The files of a local stack (outputs/RUN/logs, outputs/local/logs) are read where they are, also after its end. For
    services elsewhere it says which command shows them, and prints what the component wrote to the run's log.
    """
    from millrace.cli import interrupts
    from millrace.cli.log_files import LogQuery, own_logs, require_component, show_own
    from millrace.cli.offline.ended import ask_or_read
    from millrace.cli.view.progress import Progress

    if component is not None and form == "json":
        raise click.UsageError("--format json prints events; a component's lines are printed as it wrote them")
    if component is not None:
        query = LogQuery(component=component, **options)
        if (directory := own_logs(name)) is not None:
            require_component(component, [directory])
            interrupts.run(lambda _: show_own(directory, query))
            return
        ask_server(server, lambda client: _component_logs(client, name, query), run=name)
        return
    asked = {"is_follow": options["is_follow"], "form": form, "level": options["level"]}

    def read(ended: "EndedRun") -> None:
        """Print the events of a run whose stack has ended."""
        progress = Progress.of(ended.run)
        for event in ended.events:
            _show_event(event, progress, form=form, level=options["level"])
        _say_names(progress, form)

    ask_or_read(server, lambda client: _event_lines(client, name, **asked), read, run=name)


def _show_event(
    event: "event_pb2.Event", progress: "Progress", *, form: str, level: str | None, writer: str = ""
) -> None:
    """Apply an event to `progress`, and print it unless it is below `level` or of a writer that does not begin with
    `writer`.
    """
    from millrace.cli.view.lines import is_of_level, log_line
    from millrace.cli.view.output import message_json

    progress.apply(event)
    if event.writer.startswith(writer) and is_of_level(event, level):
        click.echo(message_json(event, indent=None) if form == "json" else log_line(event, progress))


async def _component_logs(client: "Client", name: str, query: "LogQuery") -> None:
    """Print what one service has written about the run `name`.

    That is read from its log files here, else from the events of the run.
    """
    from millrace.cli.log_files import elsewhere, require_component, show_shared, stack_logs
    from millrace.cli.options import resolve

    require_component(query.component, stack_logs(client.address))
    found = await resolve(client.runs, name)
    if await show_shared(client, query, uid=found.uid, name=found.name):
        return
    click.echo(elsewhere(query.component, found.uid, is_follow=query.is_follow), err=True)
    await _event_lines(client, found.name, is_follow=query.is_follow, writer=query.component, level=query.level)


async def _event_lines(
    client: "Client", name: str, *, is_follow: bool, form: str = "table", writer: str = "", level: str | None = None
) -> None:
    """Print the events of the run `name`, one per line; with `is_follow` go on until the run ends.

    `form` is "table" or "json". Only events of this `level` or worse (None: all), whose writer begins with `writer`,
    are printed. Without a `writer` the paths of the log files on this machine go to standard error first.
    """
    from millrace.cli.log_files import process_logs
    from millrace.cli.options import resolve
    from millrace.cli.view.progress import Progress

    found = await resolve(client.runs, name)
    if not writer:
        for path in process_logs(client.address, found.name):
            click.echo(f"process log: {path}", err=True)
    progress = Progress.of(found)

    async def events() -> AsyncIterator["event_pb2.Event"]:
        """Yield the events of the run so far, or until its end."""
        if is_follow:
            async for event in client.runs.watch(found.name):
                yield event
        else:
            for event in await client.runs.replay(found.name):
                yield event

    async for event in events():
        _show_event(event, progress, form=form, level=level, writer=writer)
    _say_names(progress, form)


def _say_names(progress: "Progress", form: str) -> None:
    """Print a note on standard error: which process each short name in the printed lines means. Nothing for JSON."""
    if progress.shown_as and form != "json":
        names = ", ".join(f"{name} is {process}" for process, name in progress.shown_as.items())
        click.echo(f"note: {names}", err=True)


@run.command()
@RUN
@click.option("--reason", default="", help="Why; shown with the run later.")
@SERVER
def cancel(name: str, reason: str, server: str | None) -> None:
    """Ask a run to end. It ends as CANCELLED at its next step boundary."""
    from millrace.cli.offline.ended import ask_or_read, refuse
    from millrace.cli.options import resolve
    from millrace.runlog.run_status import state_name

    async def act(client: "Client") -> None:
        """Ask the server to cancel the run, and print what it says."""
        found = await resolve(client.runs, name)
        asked = await client.runs.cancel(found.name, reason=reason)
        if state_name(found.state) == "CANCELLED":
            click.echo(f"{found.name} is already CANCELLED")
        else:
            click.echo(f"{asked.name} is asked to end (now {state_name(asked.state)})")

    ask_or_read(server, act, refuse, run=name)


@run.command()
@RUN
@FORMAT
@SERVER
def why(name: str, form: str, server: str | None) -> None:
    """Show what every service of a run waits for."""
    from millrace.cli.offline.ended import ask_or_read
    from millrace.cli.options import resolve
    from millrace.cli.view.output import explanation, message_json, summed_up
    from millrace.errors import NotFoundError

    def read(ended: "EndedRun") -> None:
        answer = summed_up(ended.explain())
        click.echo(message_json(answer) if form == "json" else explanation(answer))

    async def act(client: "Client") -> None:
        """Print what the server says of the run's waits."""
        try:  # the orchestrator knows its runs by heart: it answers also while nothing can be looked up
            answer = await client.runs.explain(name)
        except NotFoundError:
            found = await resolve(client.runs, name)
            answer = await client.runs.explain(found.name)
        click.echo(message_json(answer) if form == "json" else explanation(answer))

    ask_or_read(server, act, read, run=name)


def _state(text: str) -> "run_pb2.RunState":
    """Return the state that `--state` names, in any case; raise BadParameter with the known names for another text."""
    from millrace.v1 import run_pb2

    name = f"RUN_STATE_{text.upper().removeprefix('RUN_STATE_')}"
    known = [key.removeprefix("RUN_STATE_").lower() for key in run_pb2.RunState.keys()[1:]]
    if name.removeprefix("RUN_STATE_").lower() not in known:
        raise click.BadParameter(f"{text!r} is no state; there are {', '.join(known)}", param_hint="--state")
    return cast("run_pb2.RunState", run_pb2.RunState.Value(name))
