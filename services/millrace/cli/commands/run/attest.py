"""`millrace run attest`: sign the head of a run's log, so that a history that is rewritten later is found."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import CliError
from millrace.cli.options import RUN, STORE

if TYPE_CHECKING:
    from millrace.runlog.attest import Attestation
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore
    from millrace.v1.audit_pb2 import AuditReport


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
    """Sign the chain hash of a run, and its seal if it has ended, and store that beside the run.

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
    """What an audit of the store finds."""
    from millrace.cli import interrupts
    from millrace.runlog.audit import audit_run

    async def work(_: interrupts.Interrupts):
        return await audit_run(None, store, prefix=names.prefix, uid=names.uid)

    return interrupts.run(work)


def audited_head(names: "Names", report: "AuditReport") -> "Attestation":
    """The head of the run as its audit has read it, its seal included; CliError if the audit finds violations."""
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
