"""What is stored of a run, one declaration per kind of object: its key, who names it, how long it is kept, its remedy.

Names, the patterns by which keys are read, what headers and seals name, the structural part of the audit, what a repair
looks at, the fuzz targets, the tests of tampering and the table in `docs/reliability.md` follow from here. What no
schema says (the chain, the frontier, events against headers) is code: `audit/` and `repair/`.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

_FIELD = re.compile(r"\{(?P<name>[a-z0-9_]+)(?::0(?P<digits>[0-9]+)d)?\}")
_ENDING = re.compile(r"(?P<ending>\.[a-z]+)$")
_NUMBER_DIGITS = 18  # what fits into 63 bits
_PROVED_BY_HASH = "bytes with that hash"
_BACKUP = "restore the object from a replica of the bucket"

DENSE = "dense"
"""Numbered from 1 without a gap."""
HEADER = "the next header, by sha256"
"""Each header names what is new of the kind, and a seal what is new since the last header."""
SEALED = "a seal, by sha256"
"""Each seal names all that there is of the kind."""
TRAINED = "the header that trains on it, by sha256"
CHAIN = "the chain hash of the next header"
MANIFEST = "its manifest, by sha256 and size"
EVENT = "its event, by sha256"
ITS_HEADER = "its header, by sha256"


class KeptAs(StrEnum):
    """Retention classes: how long the objects of a kind are kept. `runlog/retention.py` removes by them."""

    RUN = "as long as the run"
    BATCHES = "`orchestrator.retain_batches`"
    """By step."""
    POLICIES = "`orchestrator.retain_policies`"
    """By version."""
    CHECKPOINTS = "`ckpt.keep_last`"
    """By step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """One kind of object of a run."""

    name: str
    """As documents and messages call it."""
    key: str
    """After the run's prefix, as a format string. `{step:08d}` has eight digits or more, `{nonce}` is any text."""
    codec: str = ""
    """`module:function` that reads its bytes and refuses damaged ones; empty if nobody decodes it."""
    message: str = ""
    """`module:class` of the Protobuf message that its bytes are, after compression or a checksum."""
    numbering: str = ""
    """What the numbers of its key count: `DENSE`, "by step", …"""
    has_revisions: bool = False
    """A successor `.r1`, `.r2`, … may replace a damaged object (`storage/base.py`)."""
    finding: str = ""
    """How the names of the audit's findings about the object begin; empty if there are none."""
    named_by: tuple[str, ...]
    """Who names it, and by which hash; who counts it, if there is no hash."""
    is_announced: bool = False
    """Who creates one announces it to the writer of headers (`KnownObjects.announce`), since each step brings another:
    that one lists them only where it begins."""
    is_large: bool = False
    """Only a deep audit reads its bytes; another one compares its size."""
    kept: KeptAs
    """Retention class. A kind that may go before its run has a step or a version in its key."""
    remedy: str = _BACKUP
    """What to do if it is damaged or missing."""
    repair: str = _PROVED_BY_HASH
    """What `run repair` may put in its place; empty if it restores none."""

    def __post_init__(self) -> None:
        """Raise ValueError for a kind that may go before its run, and whose key says neither step nor version."""
        if self.kept is not KeptAs.RUN and not {"step", "version"} & {
            field["name"] for field in _FIELD.finditer(self.key)
        }:
            raise ValueError(f"{self.name} goes before its run, and its key has neither step nor version")

    @property
    def folder(self) -> str:
        """Return the beginning of every key of the kind: its first folder with the slash, or the whole key."""
        first, slash, _ = self.key.partition("/")
        return first + slash

    def series(self, key: str) -> str:
        """Return the part of a key before its first number: keys that share it sort by their numbers.

        `key` is without the run's prefix. If it is not of this kind, or has no number, return the kind's folder.
        """
        match = _pattern(self).fullmatch(key)
        first = next((field["name"] for field in _FIELD.finditer(self.key) if field["digits"]), None)
        return self.folder if match is None or first is None else key[: match.start(first)]

    def path(self, **fields: object) -> str:
        """Return the key, without the run's prefix, of an object of this kind.

        `fields` fill the braces of the kind's `key`.
        """
        return self.key.format(**fields)

    def prefix(self, **fields: object) -> str:
        """Return the prefix, with a slash at its end, of all keys of the kind of one step or version, without the run's
        prefix.

        `fields` are the numbers with which keys of the kind begin, such as `step=7`, or lineage and version.
        """
        found = next(field for field in _FIELD.finditer(self.key) if field["name"] in ("step", "version"))
        return f"{self.key[: found.end()]}/".format(**fields)

    def decode(self, data: bytes, *, where: str) -> Any:
        """Decode the bytes of an object with the kind's codec, and return what that makes of them.

        CorruptObjectError, naming `where`, if they are damaged.
        """
        found = _codec(self.codec)
        # Codecs call this parameter `where` or `source`.
        taken = inspect.signature(found).parameters.keys() & {"where", "source"}
        return found(data, **dict.fromkeys(taken, where))

    def parse(self, key: str) -> Mapping[str, int | str] | None:
        """Return the numbers and texts in a key without the run's prefix, by field; None if it is no key of the kind.

        `revision` is the number of the successor, 0 for the first, where the kind has revisions. A number with more
        leading zeros than the format gives it does not count: each object has one key.
        """
        match = _pattern(self).fullmatch(key)
        if match is None:
            return None
        widths = {field["name"]: field["digits"] for field in _FIELD.finditer(self.key)}
        read = {name: int(text) if widths[name] else text for name, text in match.groupdict().items() if name in widths}
        if self.has_revisions:
            read["revision"] = int(match["revision"] or 0)
        # Format the key again from what was read: only the canonical spelling comes out equal.
        bare = key if not self.has_revisions else key.replace(f".r{match['revision']}.", ".", 1)
        return read if self.path(**{name: read[name] for name in widths}) == bare else None


RUN_JSON = ObjectKind(
    name="run.json",
    key="run.json",
    codec="millrace.runlog.records.run_record:RunRecord.decode",
    finding="RUN_JSON",
    named_by=(CHAIN, SEALED),
    kept=KeptAs.RUN,
    repair="bytes with which the chain begins",
)
TOMBSTONE = ObjectKind(
    name="tombstone",
    key="tombstone.json",
    finding="TOMBSTONE",
    named_by=("nobody: its existence counts",),
    kept=KeptAs.RUN,
    remedy="let the deletion end",
    repair="",
)
EPOCH = ObjectKind(
    name="epoch",
    key="epochs/{role}/{number:08d}",
    codec="millrace.runlog.records.numbered:decode_epoch",
    numbering=DENSE,
    finding="EPOCH",
    named_by=(HEADER,),
    kept=KeptAs.RUN,
)
GENERATION = ObjectKind(
    name="generation mark",
    key="generations/{number:08d}",
    numbering="by generation",
    finding="GENERATION",
    named_by=(SEALED,),
    kept=KeptAs.RUN,
    repair=f"{_PROVED_BY_HASH}; it is empty",
)
INTENT = ObjectKind(
    name="intent",
    key="intents/{number:08d}.json",
    codec="millrace.runlog.records.numbered:decode_intent",
    numbering=DENSE,
    finding="INTENT",
    named_by=(HEADER,),
    kept=KeptAs.RUN,
)
EVENT_ARCHIVE = ObjectKind(
    name="event archive",
    key="events/{first:08d}-{first_place:012d}_{last:08d}-{last_place:012d}.zst",
    codec="millrace.runlog.event_archive:decode_archive",
    numbering="by the ids of its events",
    finding="EVENT_ARCHIVE",
    named_by=(HEADER, SEALED),
    kept=KeptAs.RUN,
    is_announced=True,
    repair=f"{_PROVED_BY_HASH}, also made anew of Redis",
)
POLICY_MANIFEST = ObjectKind(
    name="policy manifest",
    key="policies/{lineage:04d}-{version:08d}/manifest.json",
    codec="millrace.policies.manifest:PolicyManifest.from_bytes",
    numbering="by version",
    has_revisions=True,
    finding="POLICY",
    named_by=(HEADER, "the next header, by the digest of the weights", EVENT, SEALED),
    kept=KeptAs.RUN,
    is_announced=True,
    remedy="the trainer publishes it again as its next revision",
    repair=f"{_PROVED_BY_HASH}; of a revision, a manifest of the same digest",
)
POLICY_OBJECT = ObjectKind(
    name="policy object",
    key="policies/{lineage:04d}-{version:08d}/{file}",
    numbering="by version",
    finding="POLICY",
    named_by=(MANIFEST,),
    is_large=True,
    kept=KeptAs.POLICIES,
    remedy="the trainer publishes the version again",
)
BASE_MANIFEST = ObjectKind(
    name="base manifest",
    key="base/policies/{lineage:04d}-{version:08d}/manifest.json",
    codec="millrace.policies.manifest:PolicyManifest.from_bytes",
    has_revisions=True,
    finding="POLICY",
    named_by=("manifests of adapters, by the digest of the weights", SEALED),
    kept=KeptAs.RUN,
    remedy="the trainer publishes it again as its next revision",
    repair=f"{_PROVED_BY_HASH}; of a revision, a manifest of the same digest",
)
BASE_OBJECT = ObjectKind(
    name="base object",
    key="base/policies/{lineage:04d}-{version:08d}/{file}",
    finding="POLICY",
    named_by=(MANIFEST,),
    is_large=True,
    kept=KeptAs.RUN,
    remedy="the trainer publishes the base again",
)
POLICY_FILE = ObjectKind(
    name="policy file",
    key="policy-files/e{epoch}-{nonce}/{file}",
    finding="POLICY",
    named_by=(MANIFEST,),
    is_large=True,
    kept=KeptAs.RUN,
)
CHECKPOINT_MANIFEST = ObjectKind(
    name="checkpoint manifest",
    key="checkpoints/{step:08d}/manifest.json",
    codec="millrace.trainer.checkpoint.manifest:CheckpointManifest.from_bytes",
    numbering="by step",
    has_revisions=True,
    finding="CHECKPOINT",
    named_by=(EVENT, SEALED),
    kept=KeptAs.CHECKPOINTS,
    remedy="the trainer begins at an older one",
)
CHECKPOINT_OBJECT = ObjectKind(
    name="checkpoint object",
    key="checkpoints/{step:08d}/{file}",
    numbering="by step",
    finding="CHECKPOINT",
    named_by=(MANIFEST,),
    is_large=True,
    kept=KeptAs.CHECKPOINTS,
    remedy="the trainer begins at an older one",
)
SCORES = ObjectKind(
    name="scores",
    key="scores/{digest}.bin",
    codec="millrace.rollouts.token_log:decode_scores",
    finding="SCORES",
    named_by=(TRAINED,),
    kept=KeptAs.RUN,
)
REOPENING = ObjectKind(
    name="reopening",
    key="reopened/{number:08d}.json",
    codec="millrace.runlog.records.revisions:parse_reopening",
    numbering=DENSE,
    finding="REOPENING",
    named_by=(SEALED, "the successor of the closing header that it names"),
    kept=KeptAs.RUN,
    repair="what the headers say, made anew",
)
SEAL = ObjectKind(
    name="seal",
    key="seals/{number:08d}.json",
    codec="millrace.runlog.records.sealed:Seal.decode",
    numbering="dense from 0",
    finding="SEAL",
    named_by=(SEALED, "an attestation, by sha256"),
    kept=KeptAs.RUN,
    repair="only where a later seal names it",
)
RETIREMENT = ObjectKind(
    name="retirement",
    key="retirements/{number:08d}.json",
    codec="millrace.runlog.records.retirement:Retirement.decode",
    numbering=DENSE,
    finding="RETIREMENT",
    named_by=(HEADER, SEALED),
    kept=KeptAs.RUN,
)
ATTESTATION = ObjectKind(
    name="attestation",
    key="attestations/{number:08d}.json",
    codec="millrace.runlog.attest:Attestation.decode",
    numbering=DENSE,
    finding="ATTESTATION",
    named_by=("nobody: its signature counts",),
    kept=KeptAs.RUN,
    remedy="keep a copy elsewhere (`--attestation`)",
    repair="",
)
BATCH_HEADER = ObjectKind(
    name="batch header",
    key="batches/{step:08d}.pb",
    codec="millrace.rollouts.batch_wire:decode_header",
    message="millrace.internal.v1.batch_pb2:BatchHeader",
    numbering="by step",
    has_revisions=True,
    finding="HEADER",
    named_by=(CHAIN,),
    kept=KeptAs.RUN,
    repair="bytes that continue the chain, also of Redis",
)
CHAIN_POINT = ObjectKind(
    name="chain point",
    key="chain_points/{step:08d}.json",
    codec="millrace.runlog.records.frontier:ChainPoint.decode",
    numbering="by step",
    finding="CHAIN_POINT",
    named_by=(HEADER,),
    is_announced=True,
    kept=KeptAs.RUN,
    remedy="none is needed: a takeover reads the headers before it",
)
BATCH_CHUNK = ObjectKind(
    name="batch chunk",
    key="batches/{step:08d}/e{epoch:08d}-{nonce}/chunk-{index:05d}.pb",
    codec="millrace.rollouts.batch_wire:decode_chunk",
    message="millrace.internal.v1.batch_pb2:BatchChunk",
    numbering="by step",
    finding="CHUNK",
    named_by=(ITS_HEADER,),
    kept=KeptAs.BATCHES,
    repair=f"{_PROVED_BY_HASH}, also of Redis",
)
ROLLOUT_ARCHIVE = ObjectKind(
    name="rollout archive",
    key="rollouts/{step:08d}/e{epoch:08d}-{nonce}/rollouts.pb.zst",
    codec="millrace.rollouts.wire:decode_archive",
    message="millrace.internal.v1.rollout_pb2:RolloutArchive",
    numbering="by step",
    finding="ARCHIVE",
    named_by=(ITS_HEADER,),
    kept=KeptAs.BATCHES,
)
TOKEN_LOG = ObjectKind(
    name="token log",
    key="token_logs/{step:08d}/{lineage:04d}.bin",
    codec="millrace.rollouts.token_log:decode_token_log",
    message="millrace.internal.v1.token_log_pb2:TokenLog",
    numbering="by step",
    has_revisions=True,
    finding="TOKEN_LOG",
    named_by=(EVENT,),
    is_large=True,
    kept=KeptAs.BATCHES,
    remedy="none is needed: nothing is made of it",
)
QUARANTINED = ObjectKind(
    name="quarantined object",
    key="quarantine/{key}.{sha256}",
    finding="QUARANTINED",
    named_by=("its own key, by the first 16 digits of its sha256",),
    kept=KeptAs.RUN,
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
    BASE_MANIFEST,
    BASE_OBJECT,
    POLICY_FILE,
    CHECKPOINT_MANIFEST,
    CHECKPOINT_OBJECT,
    SCORES,
    REOPENING,
    SEAL,
    RETIREMENT,
    ATTESTATION,
    BATCH_HEADER,
    CHAIN_POINT,
    BATCH_CHUNK,
    ROLLOUT_ARCHIVE,
    TOKEN_LOG,
    QUARANTINED,
]
"""Every kind. Of two that a key may be, the first is it."""


def kind_at(key: str) -> ObjectKind | None:
    """Return the kind of the object under a key without the run's prefix; None if no kind has such keys."""
    # The first that fits counts: a manifest is declared before the kind of any other file in its folder.
    return next((kind for kind in KINDS if kind.parse(key) is not None), None)


def finding_at(key: str) -> str:
    """Return how names of the audit's findings about an object begin, such as "EPOCH", by the folder of its key.

    `key` is without the run's prefix. Empty if no header or seal may name the object.
    """
    namers = {HEADER, TRAINED, SEALED}
    return next((kind.finding for kind in KINDS if namers & {*kind.named_by} and _is_within(kind, key)), "")


def is_place(key: str) -> bool:
    """Return whether a key, without the run's prefix, is in a folder that a run has, or is a file of a run.

    An object in such a folder may still be of no kind.
    """
    return any(_is_within(kind, key) for kind in KINDS)


def table() -> str:
    """Return the table of all kinds for the documents, in Markdown.

    A cell with the usual answer is empty.
    """
    usual = {KeptAs.RUN, _BACKUP}
    heads = ("object", "key", "kept", "if it is damaged")
    rows: list[tuple[str, ...]] = [heads, ("---",) * len(heads)]
    for kind in KINDS:
        key = _ENDING.sub(r"[.rN]\g<ending>", kind.key) if kind.has_revisions else kind.key
        cells = (kind.name, f"`{key}`", kind.kept, kind.remedy)
        rows.append(tuple("" if cell in usual else cell for cell in cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _is_within(kind: ObjectKind, key: str) -> bool:
    """Return whether a key without the run's prefix is in the folder of a kind, or is the one key of a kind without
    a folder.
    """
    return key.startswith(kind.folder) if kind.folder.endswith("/") else key == kind.folder


@functools.cache
def _codec(path: str) -> Callable[..., Any]:
    """Import and return the function that `path` (`module:name`) names."""
    # Imported when it is asked for, because the rooms with the codecs import this one.
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


@functools.cache
def _pattern(kind: ObjectKind) -> re.Pattern[str]:
    """Return the pattern of the kind's keys, with a group for each field and, where it has revisions, one for their
    number.
    """
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
    """Return the pattern of one field of a key: digits, any text, or for a file or key also slashes."""
    if field["digits"]:
        return f"(?P<{field['name']}>[0-9]{{{field['digits']},{_NUMBER_DIGITS}}})"
    return f"(?P<{field['name']}>{'.+' if field['name'] in ('file', 'key') else '[^/]+'})"
