"""`millrace run audit`, `repair` and `replay`: check a run against its log, restore it, and compute a step again."""

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.connection import ask_server
from millrace.cli.errors import EXIT_FAILED, CliError
from millrace.cli.offline.audit import AuditRequest, audit_here
from millrace.cli.options import FORMAT, RUN, SERVER, STORE, options

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.readers.repair import Repair
    from millrace.readers.replay_report import ReplayReport
    from millrace.runlog.attest import Attestation
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore
    from millrace.v1 import audit_pb2
    from millrace.v1.audit_pb2 import AuditReport

_FROM_HERE = options(
    click.option("--store", metavar="URL", help="Audit this object store from here, without any server."),
    click.option(
        "--redis",
        metavar="URL|FILE",
        help="From here: also compare this Redis with the store; a file that holds its URL keeps a password out of the "
        "command line, such as redis/redis.url of a stack's directory.",
    ),
    click.option("--prefix", metavar="NAME", help="From here: the deployment; else MILLRACE_PREFIX, else millrace."),
    click.option("--deep", "is_deep", is_flag=True, help="From here: read every byte, and decode every policy."),
    click.option(
        "--replay",
        "num_replays",
        metavar="N",
        type=click.IntRange(min=1),
        default=None,
        help="With --deep: also compute N steps again, spread over the run; needs the trainer's packages.",
    ),
    click.option(
        "--attestation",
        "attestations",
        metavar="FILE",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="From here: what `run attest --out` wrote must be so. May be given several times.",
    ),
    click.option(
        "--attest-key",
        "key",
        metavar="FILE",
        envvar="MILLRACE_ATTEST_KEY_FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="From here: the key that attestations are signed with; else MILLRACE_ATTEST_KEY_FILE.",
    ),
    click.option(
        "--jobs",
        metavar="N",
        type=click.IntRange(min=1),
        default=None,
        help="From here: processes that read the contents of steps at once; else as many as this machine has "
        "processors, fewer for a short run.",
    ),
    click.option(
        "--resume",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        default=None,
        help="From here: keep in FILE what was read, and go on from there if the file exists, as after a kill. It is "
        "removed when the audit is complete.",
    ),
)


def _from_here(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with the options of an audit that this process makes itself, such as `--store` and `--deep`.

    `command` is called with one `AuditRequest` made of the options, `as_json` (whether JSON is printed) and `server`.
    """

    @functools.wraps(command)
    def with_request(name: str, as_json: bool, form: str, server: str | None, **options: Any) -> int:
        return command(AuditRequest(name=name, **options), as_json=as_json or form == "json", server=server)

    return _FROM_HERE(with_request)


@click.command()
@RUN
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@FORMAT
@SERVER
@_from_here
def audit(request: AuditRequest, *, as_json: bool, server: str | None) -> int:
    """Check that nothing of a run was lost, counted twice, or changed.

    Reads everything that the run has written, in Redis and in the object store, and changes nothing. Exits 0 if the log
    keeps every promise, 1 with each violation if not, and says what it could not see.

    A server audits in a process of its own, without reading the bytes of weights. --deep, --attestation, --jobs,
    --resume and --store audit from here: the store is --store, else outputs/RUN/store, MILLRACE_STORE_URL,
    outputs/local/store.
    """
    if not request.is_here and (request.redis is not None or request.prefix is not None):
        raise click.UsageError("--redis and --prefix belong to --store, --deep, --attestation, --jobs or --resume")
    if request.is_here and server is not None:
        raise click.UsageError(
            "--store, --deep, --attestation, --jobs and --resume audit without a server: leave --server out"
        )
    if request.num_replays and not request.is_deep:
        raise click.UsageError("--replay belongs to --deep")
    with _shown_audit(request.name) as say:
        report = audit_here(request, say) if request.is_here else _by_server(request.name, server)
    _print(report, as_json=as_json)
    return EXIT_FAILED if report.violations else 0


def _print(report: "audit_pb2.AuditReport", *, as_json: bool) -> None:
    """Print the report as JSON or as text."""
    if as_json:
        from google.protobuf.json_format import MessageToDict

        document = MessageToDict(report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(document, indent=2))
    else:
        from millrace.cli.offline.audit import report_lines

        click.echo("\n".join(report_lines(report)))


def _by_server(name: str, server: str | None) -> "audit_pb2.AuditReport":
    """Return the audit report of the run `name`, made by the orchestrator at `server`.

    `server` is the value of `--server`; None: the orchestrator is looked for (`ask_server`).
    """
    from millrace.cli.options import resolve

    async def ask(client: "Client") -> "audit_pb2.AuditReport":
        found = await resolve(client.runs, name)
        return await client.runs.audit(found.name)

    return ask_server(server, ask, run=name)


@contextlib.contextmanager
def _shown_audit(name: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error, if that is a terminal, what the audit of run `name` reads and for how long.

    The block gets a function that sets the shown text; the function does nothing if standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"auditing {name}", total=None)
        yield lambda text: progress.update(task, description=f"auditing {name}: {text}")


# `millrace run attest`: sign the head of a run's log, so that a history that is rewritten later is found.


@click.command()
@RUN
@click.option(
    "--key",
    metavar="FILE",
    envvar="MILLRACE_ATTEST_KEY_FILE",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="32 random bytes or more (HMAC-SHA256), or an Ed25519 key in PEM; else MILLRACE_ATTEST_KEY_FILE.",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write it here, to be kept where nobody who can write to the store can change it.",
)
@STORE
def attest(name: str, key: Path, out: Path | None, store: str | None, prefix: str | None) -> int:
    """Sign the chain hash of a run, and the seal of one that has ended. The result is stored beside the run.

    Someone who may write to the store can make another history whose hashes all fit, but cannot sign it. `millrace run
    audit RUN --attest-key FILE` checks the signatures in the store, and `--attestation FILE` what --out wrote.
    """
    from millrace.cli.offline.run_store import open_run
    from millrace.runlog.attest import load_key, write_attestation
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(name, store, prefix, is_written=True)
    names = Names(deployment, uid)
    signed = write_attestation(objects, names, audited_head(names, _audit(objects, names)), load_key(key))
    if out is not None:
        try:
            out.write_bytes(signed.encode())
        except OSError as error:
            raise CliError(f"{out} cannot be written: {error.strerror or error}", hint="the store has it") from error
    click.echo(signed.encode().decode(), nl=False)
    return 0


def _audit(store: "ObjectStore", names: "Names") -> "AuditReport":
    """Audit the run from the object store alone, and return the report."""
    from millrace.cli import interrupts
    from millrace.readers.audit import audit_run

    async def work(_: interrupts.Interrupts):
        return await audit_run(None, store, prefix=names.prefix, uid=names.uid)

    return interrupts.run(work)


def audited_head(names: "Names", report: "AuditReport") -> "Attestation":
    """Return an unsigned attestation of the run's newest step, chain hash and seal, as the audit has read them.

    Raises CliError if the audit found violations.
    """
    from millrace.runlog.attest import unsigned

    if report.violations:
        raise CliError(
            f"{report.run} is not attested: its audit finds {len(report.violations)} violations, first "
            f"{report.violations[0].check}: {report.violations[0].message}",
            hint="see `millrace run audit`",
        )
    step = int(report.first_step + report.num_steps) - (0 if report.is_closed else 1)
    chain = bytes.fromhex(report.chain_hash)
    run, seal_sha256 = report.run.removeprefix("runs/"), report.seal_sha256
    return unsigned(names, run=run, step=step, chain=chain, seal_sha256=seal_sha256)


# `millrace run repair`: what of a run is damaged, from what it can be restored, and its restoration on request.


@click.command()
@RUN
@click.option("--apply", "is_applied", is_flag=True, help="Restore what can be restored; else nothing is changed.")
@click.option("--dry-run", is_flag=True, help="Only say what is damaged; the default.")
@click.option("--from", "backup", metavar="URL", help="A replica of the object store to restore from.")
@click.option("--store", metavar="URL", help="The object store; else outputs/RUN/store, MILLRACE_STORE_URL, …")
@click.option("--redis", metavar="URL", help="Also restore from what this Redis holds of the run.")
@click.option("--prefix", metavar="NAME", help="The deployment; else MILLRACE_PREFIX, else millrace.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def repair(
    name: str,
    is_applied: bool,
    dry_run: bool,
    backup: str | None,
    store: str | None,
    redis: str | None,
    prefix: str | None,
    as_json: bool,
) -> int:
    """Show what of a run is damaged or missing, and restore it with --apply. RUN is a name, or a uid.

    Reads every byte of the run. Only bytes are restored that another object proves to be the right ones, and nothing is
    overwritten: what is damaged is moved to `quarantine/` within the run first. Exits 0 if nothing is left to be done,
    1 if something is.
    """
    if is_applied and dry_run:
        raise click.UsageError("--apply and --dry-run contradict each other")
    from millrace.readers.repair import RepairState

    uid, repairs = _repair(name, is_applied, backup, store, redis, prefix)
    if as_json:
        click.echo(json.dumps({"run_uid": uid, "repairs": [asdict(each) for each in repairs]}, indent=2))
    else:
        click.echo("\n".join(_lines(uid, repairs)))
    return EXIT_FAILED if any(each.state in (RepairState.RESTORABLE, RepairState.REFUSED) for each in repairs) else 0


def _repair(
    name: str, is_applied: bool, backup: str | None, store: str | None, redis: str | None, prefix: str | None
) -> "tuple[str, list[Repair]]":
    """Return the run's uid, and what is damaged or missing in it; restore that if `is_applied`.

    The other arguments are the values of the command's options. Raises NotFoundError if the store has no such run.
    """
    from millrace.cli import interrupts
    from millrace.cli.offline.run_store import find_uid, naming, store_of, store_prefix
    from millrace.errors import CorruptObjectError, LogGoneError, NotFoundError
    from millrace.readers.repair import repair_run, require_run
    from millrace.runlog import RunLog, open_redis
    from millrace.runlog.names import Names
    from millrace.storage import open_store
    from millrace.storage.self_test import require_tested

    (objects, meant), deployment = store_of(name, store), store_prefix(prefix)
    if is_applied:
        require_tested(objects, prefix=deployment).result()
    with naming("--from"):
        replica = None if backup is None else open_store(backup)
    try:
        uid = find_uid(objects, deployment, meant)
    except (NotFoundError, CorruptObjectError, UnicodeDecodeError):
        uid = meant.removeprefix("runs/")  # the object that leads from the name to the uid may be what is damaged
        require_run(objects, Names(deployment, uid))
    names = Names(deployment, uid)

    async def work(_: interrupts.Interrupts) -> "list[Repair]":
        """Find the damages of the run, and restore them if that is asked for."""
        with naming("--redis"):
            client = None if redis is None else open_redis(redis)
        try:
            log = None
            if client is not None:
                try:
                    log = await RunLog.open(client, objects, prefix=deployment, uid=uid)
                except LogGoneError:
                    click.echo("Redis does not hold the log of the run: nothing is restored from it", err=True)
            return await repair_run(log, objects, names, backup=replica, is_applied=is_applied)
        finally:
            if client is not None:
                await client.aclose()

    return uid, interrupts.run(work)


def _lines(uid: str, repairs: "list[Repair]") -> list[str]:
    """Return the found damages of a run as lines of text.

    They are a table, a line of detail for each, and the number in each state.
    """
    from millrace.cli.view.text import table
    from millrace.readers.repair import RepairState

    if not repairs:
        return [f"run {uid}: nothing is damaged or missing"]
    rows = [(_short(each.key, uid), each.problem, each.source or "–", each.state.value) for each in repairs]
    lines = [table(rows, header=("OBJECT", "PROBLEM", "FROM", "STATE"))]
    lines += [f"  {_short(each.key, uid)}: {each.detail}" for each in repairs]
    lines += [f"  damaged bytes kept: {each.quarantine}" for each in repairs if each.quarantine]
    counts = {state: sum(each.state is state for each in repairs) for state in RepairState}
    lines.append(", ".join(f"{count} {state.value}" for state, count in counts.items() if count))
    if counts[RepairState.RESTORABLE]:
        lines.append("nothing was changed: --apply restores what is restorable")
    return lines


def _short(key: str, uid: str) -> str:
    """Return an object's key without its beginning up to the run's directory; the whole key if it is not of the run
    `uid`.
    """
    return key.partition(f"/runs/{uid}/")[2] or key


# `millrace run replay`: recompute a step of a run from its log, in this process.

_INSTALL = "pip install 'millrace[trainer]'"
OnStep = Callable[[int, int], None]


@click.command()
@RUN
@click.option(
    "--step",
    type=click.IntRange(min=1),
    required=True,
    metavar="K",
    help="The step, counted from 1: it makes version K.",
)
@click.option(
    "--loss",
    metavar="MODULE:FUNCTION",
    default=None,
    help="Also show the metrics of the step under this loss, written like millrace.trainer.losses.policy_losses: "
    "(LossInputs, LossConfig) -> TokenLosses.",
)
@STORE
def replay(name: str, step: int, loss: str | None, store: str | None, prefix: str | None) -> int:
    """Recompute a step of a run, and compare the policy with the published one.

    Begins at the newest kept checkpoint at or before the step. Reads the object store only, writes nothing into it, and
    needs neither Redis nor a server. `--loss` only adds metrics of another loss. Exits 0 if the digests are equal, else
    1 with the tensors that differ.
    """
    if loss == "":
        raise click.BadParameter("is empty; name a MODULE:FUNCTION or leave it out", param_hint="--loss")
    from millrace.cli.offline.run_store import open_run
    from millrace.readers.replay_report import report_lines
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(name, store, prefix)
    names = Names(deployment, uid)
    recompute = _recompute()
    with _progress(name) as on_step:
        report = recompute(objects, names, step=step - 1, loss=loss or "", on_step=on_step)
    click.echo("\n".join(report_lines(report)))
    return report.exit_code


def _recompute() -> Callable[..., "ReplayReport"]:
    """Return the function `replay` of `millrace.readers.replay`.

    It is imported by name, because the command line has to work without torch. Raises CliError if a package is missing.
    """
    try:
        return importlib.import_module("millrace.readers.replay").replay
    except ModuleNotFoundError as error:
        raise CliError(f"replay computes with {error.name}, which is not installed here", hint=_INSTALL) from error


@contextmanager
def _progress(name: str) -> Iterator[OnStep]:
    """Show the progress of a replay on standard error: a bar on a terminal, otherwise a line per step.

    The block gets the function to call with the steps done and in total.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: click.echo(f"replaying {name}: {done} of {total} steps", err=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"replaying {name}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
