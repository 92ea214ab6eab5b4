"""What is stored of a run, one declaration per kind of object: its key, who names it, how long it is kept, its remedy.

Names, the patterns by which keys are read, the audit's tables and the table in `docs/reliability.md` follow from here.
What no schema says (the chain, the frontier, events against headers) is code: `audit/` and `repair/`.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIELD = re.compile(r"\{(?P<name>[a-z0-9_]+)(?::0(?P<digits>[0-9]+)d)?\}")
_ENDING = re.compile(r"(?P<ending>\.[a-z]+)$")
_NUMBER_DIGITS = 18  # what fits into 63 bits
_PROVED_BY_HASH = "bytes with that hash"
_BACKUP = "restore the object from a replica of the bucket"
_KEPT = "as long as the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """One kind of object of a run."""

    name: str
    """As documents and messages call it."""
    key: str
    """Behind the run's prefix, as a format string. `{step:08d}` has eight digits or more, `{nonce}` is any text."""
    codec: str = ""
    """`module:function` within `millrace` that reads its bytes and refuses damaged ones; empty if nobody decodes it."""
    numbering: str = ""
    """What the numbers of its key count: "dense" from 1 without a gap, "dense from 0", "by step" or "by version"."""
    has_revisions: bool = False
    """A successor `.r1`, `.r2`, … may stand in for a damaged object (`storage/commit_points.py`)."""
    finding: str = ""
    """How the names of the audit's findings begin, where a header or a seal names the object; empty if none does."""
    named_by: str
    """Who names it, and by which hash; who counts it, if there is no hash."""
    kept: str = _KEPT
    """Retention class."""
    remedy: str = _BACKUP
    """What to do if it is damaged or missing."""
    repair: str = _PROVED_BY_HASH
    """What `run repair` may put in its place; empty if it restores none."""

    @property
    def folder(self) -> str:
        """Return the beginning of every key of the kind: its first folder with the slash, or the whole key."""
        first, slash, _ = self.key.partition("/")
        return first + slash

    def path(self, **fields: object) -> str:
        """Return the key behind the run's prefix for the numbers and texts of `fields`."""
        return self.key.format(**fields)

    def parse(self, key: str) -> Mapping[str, int | str] | None:
        """Read the fields of a key behind the run's prefix; None if it is no key of the kind.

        `revision` is the number of the successor, 0 for the first, where the kind has revisions. A number with more
        zeros in front than its key gives it is none: each object has one key.
        """
        match = _pattern(self).fullmatch(key)
        if match is None:
            return None
        widths = {field["name"]: field["digits"] for field in _FIELD.finditer(self.key)}
        read = {name: int(text) if widths[name] else text for name, text in match.groupdict().items() if name in widths}
        if self.has_revisions:
            read["revision"] = int(match["revision"] or 0)
        bare = key if not self.has_revisions else key.replace(f".r{match['revision']}.", ".", 1)
        return read if self.path(**{name: read[name] for name in widths}) == bare else None


RUN_JSON = ObjectKind(
    name="run.json",
    key="run.json",
    codec="runlog.records.run_record:RunRecord.decode",
    finding="RUN_JSON",
    named_by="the chain, which begins with its hash; a seal by sha256",
    repair="bytes with which the chain begins",
)
TOMBSTONE = ObjectKind(
    name="tombstone",
    key="tombstone.json",
    named_by="nobody: its existence counts",
    kept="until the run is deleted",
    remedy="let the deletion end",
    repair="",
)
EPOCH = ObjectKind(
    name="epoch",
    key="epochs/{role}/{number:08d}",
    codec="decoding:decode_object",
    numbering="dense",
    finding="EPOCH",
    named_by="the next header, by sha256",
)
GENERATION = ObjectKind(
    name="generation mark",
    key="generations/{number:08d}",
    numbering="dense",
    finding="GENERATION",
    named_by="a seal, by sha256",
)
INTENT = ObjectKind(
    name="intent",
    key="intents/{number:08d}.json",
    codec="decoding:decode_object",
    numbering="dense",
    finding="INTENT",
    named_by="the next header, by sha256",
)
EVENT_ARCHIVE = ObjectKind(
    name="event archive",
    key="events/{first:08d}-{first_place:012d}_{last:08d}-{last_place:012d}.zst",
    codec="runlog.events.archive:decode_archive",
    numbering="by the ids of its events",
    finding="EVENT_ARCHIVE",
    named_by="the next header, by sha256",
    repair=f"{_PROVED_BY_HASH}, also made anew of Redis",
)
POLICY_MANIFEST = ObjectKind(
    name="policy manifest",
    key="policies/{lineage:04d}-{version:08d}/manifest.json",
    codec="policies.manifest:PolicyManifest.from_bytes",
    numbering="by version",
    has_revisions=True,
    finding="POLICY",
    named_by="the next header, by sha256 and by the digest of the weights",
    remedy="the trainer publishes it again as its next revision",
    repair=f"{_PROVED_BY_HASH}; of a revision, a manifest of the same digest",
)
POLICY_OBJECT = ObjectKind(
    name="policy object",
    key="policies/{lineage:04d}-{version:08d}/{file}",
    numbering="by version",
    finding="POLICY",
    named_by="its manifest, by sha256 and size",
    remedy="the trainer publishes the version again",
)
POLICY_FILE = ObjectKind(
    name="policy file",
    key="policy-files/e{epoch}-{nonce}/{file}",
    named_by="policy manifests, by sha256 and size",
)
CHECKPOINT_MANIFEST = ObjectKind(
    name="checkpoint manifest",
    key="checkpoints/{step:08d}/manifest.json",
    codec="trainer.checkpoint.manifest:CheckpointManifest.from_bytes",
    numbering="by step",
    has_revisions=True,
    finding="CHECKPOINT",
    named_by="its event and the seal, by sha256",
    kept="`ckpt` retention",
    remedy="the trainer begins at an older one",
)
CHECKPOINT_OBJECT = ObjectKind(
    name="checkpoint object",
    key="checkpoints/{step:08d}/{file}",
    numbering="by step",
    finding="CHECKPOINT",
    named_by="its manifest, by sha256 and size",
    kept="`ckpt` retention",
    remedy="the trainer begins at an older one",
)
SCORES = ObjectKind(
    name="scores",
    key="scores/{digest}.bin",
    codec="rollouts.scores:with_scores",
    finding="SCORES",
    named_by="the header that trains on it, by sha256",
)
REOPENING = ObjectKind(
    name="reopening",
    key="reopened/{number:08d}.json",
    codec="runlog.records.revisions:parse_reopening",
    numbering="dense",
    finding="REOPENING",
    named_by="a later seal, by sha256; the closing header's successor",
    repair="what the headers say, made anew",
)
SEAL = ObjectKind(
    name="seal",
    key="seals/{number:08d}.json",
    codec="runlog.records.sealed:Seal.decode",
    numbering="dense from 0",
    finding="SEAL",
    named_by="a later seal and an attestation, by sha256",
    repair="only where a later seal names it",
)
ATTESTATION = ObjectKind(
    name="attestation",
    key="attestations/{number:08d}.json",
    codec="runlog.attest:Attestation.decode",
    numbering="dense",
    named_by="nobody: its signature counts",
    remedy="keep a copy elsewhere (`--attestation`)",
    repair="",
)
BATCH_HEADER = ObjectKind(
    name="batch header",
    key="batches/{step:08d}.pb",
    codec="rollouts.batch_wire:decode_header",
    numbering="by step",
    has_revisions=True,
    named_by="the chain hash of the next header",
    repair="bytes that continue the chain, also of Redis",
)
BATCH_CHUNK = ObjectKind(
    name="batch chunk",
    key="batches/{step:08d}/e{epoch:08d}-{nonce}/chunk-{index:05d}.pb",
    codec="rollouts.batch_wire:decode_chunk",
    numbering="by step",
    named_by="its header, by sha256",
    kept="until a checkpoint has what it taught",
    repair=f"{_PROVED_BY_HASH}, also of Redis",
)
ROLLOUT_ARCHIVE = ObjectKind(
    name="rollout archive",
    key="rollouts/{step:08d}/e{epoch:08d}-{nonce}/rollouts.pb.zst",
    codec="rollouts.wire:decode_archive",
    numbering="by step",
    named_by="its header, by sha256",
)
TOKEN_LOG = ObjectKind(
    name="token log",
    key="token_logs/{step:08d}/{lineage:04d}.bin",
    codec="rollouts.token_log:decode_token_log",
    numbering="by step",
    has_revisions=True,
    named_by="its event, by sha256 and size",
    remedy="none is needed: nothing is made of it",
    repair="",
)
QUARANTINED = ObjectKind(
    name="quarantined object",
    key="quarantine/{key}.{sha256}",
    named_by="its own key, by the first 16 digits of its sha256",
    remedy="none is needed: damaged bytes are kept in it",
    repair="",
)

KINDS = [
    RUN_JSON,
    TOMBSTONE,
    EPOCH,
    GENERATION,
    INTENT,
    EVENT_ARCHIVE,
    POLICY_MANIFEST,
    POLICY_OBJECT,
    POLICY_FILE,
    CHECKPOINT_MANIFEST,
    CHECKPOINT_OBJECT,
    SCORES,
    REOPENING,
    SEAL,
    ATTESTATION,
    BATCH_HEADER,
    BATCH_CHUNK,
    ROLLOUT_ARCHIVE,
    TOKEN_LOG,
    QUARANTINED,
]
"""Every kind. Of two that a key may be, the first is it."""


def kind_at(key: str) -> ObjectKind | None:
    """Return the kind of the object under a key behind the run's prefix; None if it is no object of a run."""
    return next((kind for kind in KINDS if kind.parse(key) is not None), None)


def finding_at(key: str) -> str:
    """Return how findings about an object begin, by the folder of its key; empty if nobody may name it by a hash."""
    return next((kind.finding for kind in KINDS if kind.finding and _is_within(kind, key)), "")


def is_place(key: str) -> bool:
    """Return whether a key is in a folder, or is a file, that a run has; what is in a folder may be left over."""
    return any(_is_within(kind, key) for kind in KINDS)


def table() -> str:
    """Return the table of all kinds for the documents, in Markdown, with empty cells for the usual answers."""
    usual = {_KEPT, _BACKUP, _PROVED_BY_HASH}
    heads = ("object", "key", "numbers", "named by", "kept", "if it is damaged", "a repair takes")
    rows: list[tuple[str, ...]] = [heads, ("---",) * len(heads)]
    for kind in KINDS:
        key = _ENDING.sub(r"[.rN]\g<ending>", kind.key) if kind.has_revisions else kind.key
        cells = (kind.name, f"`{key}`", kind.numbering, kind.named_by, kind.kept, kind.remedy, kind.repair or "nothing")
        rows.append(tuple("" if cell in usual else cell for cell in cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _is_within(kind: ObjectKind, key: str) -> bool:
    return key.startswith(kind.folder) if kind.folder.endswith("/") else key == kind.folder


@functools.cache
def _pattern(kind: ObjectKind) -> re.Pattern[str]:
    text, parts, end = kind.key, list[str](), 0
    for field in _FIELD.finditer(text):
        parts += [re.escape(text[end : field.start()]), _field_pattern(kind, field)]
        end = field.end()
    rest = re.escape(text[end:])
    if kind.has_revisions:
        before, ending = text[end:], _ENDING.search(text)
        if ending is None:
            raise ValueError(f"{kind.name} has revisions, and its key has no ending")
        before = before.removesuffix(ending[0])
        rest = rf"{re.escape(before)}(?:\.r(?P<revision>[1-9][0-9]{{0,3}}))?{re.escape(ending[0])}"
    return re.compile("".join(parts) + rest)


def _field_pattern(kind: ObjectKind, field: re.Match[str]) -> str:
    if field["digits"]:
        return f"(?P<{field['name']}>[0-9]{{{field['digits']},{_NUMBER_DIGITS}}})"
    return f"(?P<{field['name']}>{'.+' if field['name'] in ('file', 'key') else '[^/]+'})"
