"""`millrace run samples` and `millrace eval show`: prompts, replies and rewards of a run."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.offline.samples import SORTS, SampleFilter, read_samples, sort_samples
from millrace.cli.options import RUN, STORE

if TYPE_CHECKING:
    from millrace.cli.offline.samples import SampleRecord
    from millrace.storage import ObjectStore

_SHOWN = 20
_ORDERS = [sign + name for name in SORTS for sign in ("", "-")]


@click.command()
@RUN
@click.option("--env", default="", metavar="NAME", help="Only of this environment.")
@click.option(
    "--step", type=click.IntRange(min=0), default=None, help="Only those that this batch resolved, from 0 on."
)
@click.option("--task", type=click.IntRange(min=0), default=None, help="Only of this task: all members of its group.")
@click.option("--status", default="", metavar="S", help="Only with this status, such as ok or env_error.")
@click.option("--purpose", type=click.Choice(["train", "eval"]), default=None, help="Only training, or evaluation.")
@click.option("--min-reward", type=float, default=None, help="Only with this reward or more.")
@click.option("--max-reward", type=float, default=None, help="Only with this reward or less.")
@click.option("--text", default="", help="Only those with this text in a message.")
@click.option(
    "--sort", "order", type=click.Choice(_ORDERS), default="step", show_default=True, metavar="KEY",
    help=f"By {', '.join(SORTS)}; with - before it the other way round.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(min=1), default=None, help="How many are shown; 20 if left out, with sft all."
)
@click.option("--full", "is_full", is_flag=True, help="Whole conversations instead of one line each.")
@click.option(
    "-o", "--format", "form", type=click.Choice(["table", "json", "sft"]), default="table", show_default=True,
    help="sft: rows for `millrace sft --data.name FILE`.",
)  # fmt: skip
@STORE
def samples(
    name: str,
    order: str,
    limit: int | None,
    is_full: bool,
    form: str,
    store: str | None,
    prefix: str | None,
    **filters: Any,
) -> int:
    """Show prompts, replies and rewards of a run.

    RUN is a name, the beginning of one, a uid, - for the most recent run, or the directory that `millrace rl` and
    `millrace eval` have written. Reads the object store only, and needs no server. Shows what a committed batch has
    resolved: trained on, evaluated, dropped and failed rollouts. With `--format sft` those that ended well, as rows; of
    a run that trains only those of training, unless `--purpose eval` is given.
    """
    from millrace.cli.offline.run_store import open_run, say_retired
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(name, store, prefix)
    if filters.get("step") is None:
        say_retired(objects, Names(deployment, uid))
    trains = _trains(objects, deployment, uid)
    if form == "sft" and filters["purpose"] is None and trains:
        filters["purpose"] = "train"  # held-out tasks are not trained on by accident
    found = read_samples(
        objects, deployment, uid, SampleFilter(**{key: value for key, value in filters.items() if value is not None})
    )
    if form == "sft":
        _write_rows(found if limit is None else _first(found, order, limit)[0])
        return 0
    shown, total = _first(found, order, limit or _SHOWN)
    if form == "json":
        for each in shown:
            click.echo(json.dumps(each.to_json()))
        return 0
    from millrace.cli.view.output import Paint
    from millrace.cli.view.records import sample_lines, sample_table

    if is_full:
        click.echo("\n".join(line for each in shown for line in sample_lines(each, has_versions=trains)))
    elif shown:
        click.echo(sample_table(shown, has_versions=trains, paint=Paint.of(sys.stdout)))
    more = "; --full shows conversations" if shown and not is_full else ""
    if not total and trains and filters["purpose"] == "eval":
        more = " of an evaluation; --purpose train shows those of training"
    click.echo(f"{len(shown)} of {total} samples{more}")
    return 0


def _trains(objects: "ObjectStore", prefix: str, uid: str) -> bool:
    """Return whether the run trains a model; True if its record does not exist."""
    from millrace.errors import NotFoundError
    from millrace.runlog.names import Names
    from millrace.runlog.records.run_record import EVAL, RunRecord

    key = Names(prefix, uid).run_json
    try:
        return RunRecord.parse(objects.get(key), where=key).kind != EVAL
    except NotFoundError:
        return True


def _write_rows(samples: "Iterable[SampleRecord]") -> None:
    """Print each usable sample as a row of JSON. The number of rows, and what was left out, goes to standard error."""
    from millrace.cli.offline.samples import TrainingRows

    rows = TrainingRows()
    for each in samples:
        if (row := rows.row(each)) is not None:
            click.echo(json.dumps(row))
    click.echo(rows.describe(), err=True)


def _first(found: "Iterator[SampleRecord]", order: str, limit: int) -> "tuple[list[SampleRecord], int]":
    """Return the first `limit` records in an order, and the number of all records found.

    `order` is a name in `SORTS`, descending with a `-` before it. About 2 * `limit` records are held at a time.
    """
    kept: list[SampleRecord] = []
    total = 0
    for each in found:
        total += 1
        kept.append(each)
        if len(kept) >= 2 * limit + 100:
            kept = sort_samples(kept, order)[:limit]
    return sort_samples(kept, order)[:limit], total
