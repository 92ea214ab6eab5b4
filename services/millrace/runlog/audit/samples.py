"""What a header names: its samples belong to ordinals that it trains, and its chunks are what was written."""

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.runlog.audit.findings import Audit
from millrace.runlog.records.revisions import read_chunk


def check_samples(audit: Audit, header: batch_pb2.BatchHeader, trained: set[int]) -> None:
    """Each sample is of a trained ordinal, each trained ordinal has one; all samples of a member are of one attempt."""
    attempts: dict[tuple[int, int], int] = {}
    strangers: set[int] = set()
    for sample in header.samples:
        if sample.ordinal not in trained:
            strangers.add(sample.ordinal)
        first = attempts.setdefault((sample.ordinal, sample.member), sample.attempt)
        if first != sample.attempt:
            audit.findings.violation(
                "MEMBER_TRAINED_TWICE",
                f"step {header.step} trains member {sample.member} of ordinal {sample.ordinal} from attempts {first} "
                f"and {sample.attempt}",
            )
    for ordinal in sorted(strangers):
        audit.findings.violation(
            "SAMPLE_NOT_TRAINED", f"step {header.step} has samples of ordinal {ordinal}, which it does not train"
        )
    for ordinal in sorted(trained - {ordinal for ordinal, _ in attempts}):
        audit.findings.violation(
            "TRAINED_WITHOUT_SAMPLE", f"step {header.step} trains ordinal {ordinal} and has no sample of it"
        )


def check_chunks(audit: Audit, header: batch_pb2.BatchHeader, *, must_exist: bool) -> tuple[int, int]:
    """Read every chunk and compare size and sha256; returns how many were right and how many are gone for good."""
    verified = gone = 0
    for index, chunk in enumerate(header.chunks):
        where = f"chunk {index} of batch {header.step} ({audit.uri(chunk.key) if chunk.key else 'without a key'})"
        if not chunk.key:
            audit.findings.violation("CHUNK_MISSING", f"{where}: the header names no object")
            continue
        if not audit.is_own(chunk.key):
            audit.findings.violation("CHUNK_MISSING", f"{where}: the key is not that of an object of this run")
            continue
        try:
            read_chunk(audit.store, header, index)
            verified += 1
        except NotFoundError:
            if must_exist:
                audit.findings.violation("CHUNK_MISSING", f"{where} does not exist")
            else:
                gone += 1
        except CorruptObjectError as error:
            audit.findings.violation("CHUNK_CORRUPT", f"{where}: {error.message}")
    return verified, gone
