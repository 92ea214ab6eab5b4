"""Distinguishes what retention has removed from what was lost: a missing object must be covered by a record."""

from bisect import bisect_left
from collections import defaultdict

from millrace.errors import CorruptObjectError
from millrace.readers.audit.findings import Audit
from millrace.runlog.catalogue import RETIREMENT, KeptAs, kind_at
from millrace.runlog.records.retirement import Retired, Retirement


class RetirementCheck:
    """Validates the records of retention, decides whether one covers a missing object, and reports what was retired."""

    def __init__(self, audit: Audit) -> None:
        """Create it without records; `read` reads them."""
        self._audit = audit
        self._records: list[Retirement] = []
        self._gone: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        """Step or version, and number of the record, of every missing object, by its kind and why."""
        self._counted: set[str] = set()

    def read(self) -> None:
        """Read and validate every record.

        Each must be of this run, and retire at least what the one before it retires.
        """
        findings = self._audit.findings
        for place, key, _, record in self._audit.read_kind(RETIREMENT):
            if record is None:
                continue
            where = self._audit.uri(key)
            if (record.run_uid, record.number) != (self._audit.names.uid, place["number"]):
                findings.violation(
                    "RETIREMENT_MISNAMED", f"{where} is retirement {record.number} of run {record.run_uid[:80]!r}"
                )
                continue
            if self._records:
                self._compare(where, self._records[-1], record)
            self._records.append(record)

    def has(self, kept: KeptAs) -> bool:
        """Return whether a record retires anything of a class."""
        return any(kept in record.retired for record in self._records)

    def covers(self, key: str) -> bool:
        """Return whether an object that is missing was retired, and count it; `key` is the whole key.

        If no record covers it, those that were written since `read` are read, too: a live run may have retired
        it meanwhile.
        """
        own = key.removeprefix(self._audit.names.root)
        kind = kind_at(own)
        if kind is None or kind.kept is KeptAs.RUN:
            return False
        place, is_read = kind.parse(own) or {}, False
        while (number := bisect_left(self._records, True, key=lambda record: record.covers(own))) == len(self._records):
            if is_read or not self._read_on():
                return False
            is_read = True
        record = self._records[number]
        if own not in self._counted:
            self._counted.add(own)
            at = int(place.get("step", place.get("version", 0)))
            self._gone[kind.name, record.of(kind.kept).why].append((at, record.number))
        return True

    def tell(self) -> None:
        """Report what was retired, and by which records."""
        for (name, why), found in sorted(self._gone.items()):
            steps, numbers = [at for at, _ in found], [number for _, number in found]
            first = self._audit.uri(self._audit.names.retirement(min(numbers)))
            until = f" to {max(numbers):08d}.json" if max(numbers) > min(numbers) else ""
            what = "versions" if name.startswith("policy") else "steps"
            self._audit.findings.note(
                "RETIRED",
                f"{len(found)} objects ({name}) of the {what} {min(steps)} to {max(steps)} were retired by "
                f"{first}{until}, as {why} says",
            )
            self._audit.findings.not_seen(
                "RETIRED", f"what {len(found)} objects ({name}) held was not compared: they were retired"
            )

    def _compare(self, where: str, before: Retirement, record: Retirement) -> None:
        for kept, earlier in before.retired.items():
            if not record.of(kept).includes(earlier):
                self._audit.findings.violation(
                    "RETIREMENT_BACK",
                    f"{where} brings back {kept.name.lower()} that retirement {before.number} had retired",
                )

    def _read_on(self) -> bool:
        """Read the records that were written since the last one was read; return whether there were any."""
        audit, number = self._audit, len(self._records)
        while (data := audit.get(key := audit.names.retirement(len(self._records) + 1), what="retirement")) is not None:
            try:
                self._records.append(Retirement.decode(data, where=audit.uri(key)))
            except CorruptObjectError:  # the next audit reports it
                break
        return len(self._records) > number


def retires_checkpoints_only(audit: Audit, own: str) -> bool:
    """Return whether a record adds checkpoints and nothing else; `own` is its key without the run's prefix.

    Such a record may come after the seal of a run that did not succeed: its trainer still finishes a checkpoint.
    """
    place = RETIREMENT.parse(own)
    if place is None:
        return False
    found = list[dict[KeptAs, Retired]]()
    for key in (audit.names.retirement(int(place["number"]) - 1), audit.names.root + own):
        data = audit.get(key, what="retirement")
        try:
            retired = {} if data is None else Retirement.decode(data, where=key).retired
        except CorruptObjectError:  # reported where retirements are read
            return False
        found.append({kept: each for kept, each in retired.items() if kept is not KeptAs.CHECKPOINTS})
    return found[0] == found[1]
