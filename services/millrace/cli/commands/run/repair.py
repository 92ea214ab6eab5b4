"""`millrace run repair`: what of a run is damaged, from what it can be restored, and its restoration on request."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import EXIT_FAILED
from millrace.cli.options import RUN

if TYPE_CHECKING:
    from millrace.readers.repair import Repair


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
    """Say what of a run is damaged or missing, and restore it with --apply. RUN is a name, or a uid.

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
    return key.partition(f"/runs/{uid}/")[2] or key
