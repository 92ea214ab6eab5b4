"""The archived events, object by object, so that a damaged one hides no other."""

from millrace.errors import CorruptObjectError
from millrace.runlog.audit.findings import Audit
from millrace.runlog.events.archive import decode_archive
from millrace.runlog.redis.entry import Entry, id_order


def read_archives(audit: Audit) -> list[Entry]:
    """Every archived event that can be read, each id once; those of a writer may come in any order."""
    found: dict[str, Entry] = {}
    prefix = audit.names.event_archive
    for key, data in audit.read_each(prefix, "event archive", missing="EVENT_ARCHIVE_MISSING"):
        audit.progress(f"events {key.removeprefix(prefix)}")
        where = audit.uri(key)
        with audit.reading("EVENT_ARCHIVE_CORRUPT", where):
            entries = decode_archive(data, where)
            _check_name(audit, key, entries)
            for entry in entries:
                if found.setdefault(entry.id, entry).h != entry.h:
                    audit.findings.violation(
                        "EVENT_ARCHIVE_CHANGED",
                        f"{where} has another event {entry.id} than an archive that overlaps it: one was changed",
                    )
    return list(found.values())


def _check_name(audit: Audit, key: str, entries: list[Entry]) -> None:
    ids = [id_order(entry.id) for entry in entries]
    if not entries or ids != sorted(set(ids)):
        raise CorruptObjectError("its events are not in the order of their ids", reason="EVENT_ARCHIVE_CORRUPT")
    if audit.names.archived_events(entries[0].id, entries[-1].id) != key:
        audit.findings.violation(
            "EVENT_ARCHIVE_CHANGED", f"{audit.uri(key)} holds the events {entries[0].id} to {entries[-1].id}"
        )
