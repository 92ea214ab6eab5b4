"""Every name of a run: Redis keys, object keys, and the name that a person gives it.

Keys are `{prefix}:{uid}:…` with a Redis Cluster hash tag around the uid only, so that one run lives in one slot.
Objects are `{prefix}/runs/{uid}/…`; their kinds are declared in `runlog/catalogue.py`. These names are the stored
format of a deployment: never change one.
"""

import difflib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from millrace.errors import InvalidSpecError, NotFoundError, Violation
from millrace.runlog import catalogue
from millrace.storage.base import revision_key

_PREFIX = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_UID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_RUN_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Stream(StrEnum):
    """The four streams of a run."""

    ROLLOUTS = "rollouts"
    BATCHES = "batches"
    POLICIES = "policies"
    EVENTS = "events"


def new_uid() -> str:
    """Return a run uid that is never reused: 48 bits of milliseconds, then 64 random bits, hex; sorts by creation."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def check_run_name(name: str) -> str:
    """Return `name` if it is legal (letters, digits, '.', '_', '-', at most 63), else raise `InvalidSpecError`."""
    return _check(_RUN_NAME, name, "run.name", "letters, digits, '.', '_', '-', at most 63, ends alphanumeric")


def check_request_id(request_id: str) -> str:
    """Return `request_id` if it is legal (at most 128 of letters, digits, '.', '_', '-'), else raise
    `InvalidSpecError`.
    """
    return _check(_REQUEST_ID, request_id, "request_id", "1 to 128 letters, digits, '.', '_', '-'")


def rollout_id(step: int, revision: int, place: int) -> str:
    """Return the name of a rollout in lists, such as `12-3` or `12r1-3`.

    It has the step and revision of the header that resolved the rollout, and its place in the archive.
    """
    return f"{step}{f'r{revision}' if revision else ''}-{place}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Names that belong to a deployment or tenant rather than to one run."""

    prefix: str

    def __post_init__(self) -> None:
        """Raise InvalidSpecError unless the prefix is legal."""
        _check(
            _PREFIX,
            self.prefix,
            "MILLRACE_PREFIX",
            "1 to 63 of a-z, 0-9, '.', '_', '-', and start with a letter or digit",
        )

    @property
    def runs_key(self) -> str:
        """Return the key of the Redis hash that has the uid of every run by its name.

        It is in another slot than the runs, so that no script has it together with their keys.
        """
        return f"{self.prefix}:runs"

    @property
    def open_key(self) -> str:
        """Return the key of the Redis hash that has, by mark, the names of the runs that may not have ended."""
        return f"{self.prefix}:open"

    @property
    def open_prefix(self) -> str:
        """Return the prefix of the objects that mark a run as one that may not have ended."""
        return f"{self.prefix}/open/"

    def open_object(self, uid: str, number: int = 0) -> str:
        """Return the key of the object that marks a run as one that may not have ended, after it was reopened `number`
        times.

        The object holds the run's name, and is removed when that end is sealed.
        """
        return f"{self.open_prefix}{Names(self.prefix, uid).uid}.{number}"

    @property
    def open_complete(self) -> str:
        """Return the key of the object that says that every run that may not have ended has a mark."""
        return f"{self.prefix}/open.complete"

    @property
    def names_prefix(self) -> str:
        """Return the prefix of the create-only objects that make run names unique."""
        return f"{self.prefix}/names/"

    def name_object(self, name: str) -> str:
        """Return the key of the create-only object that holds the uid of the run called `name`."""
        return f"{self.names_prefix}{check_run_name(name)}"

    @property
    def requests_prefix(self) -> str:
        """Return the prefix of the create-only objects that make requests unique."""
        return f"{self.prefix}/requests/"

    def request_object(self, request_id: str) -> str:
        """Return the key of the create-only object that holds the uid that a request created."""
        return f"{self.requests_prefix}{check_request_id(request_id)}"


@dataclass(frozen=True, slots=True)
class Names:
    """Redis keys and object keys of the run `uid` in the deployment `prefix`."""

    prefix: str
    uid: str

    def __post_init__(self) -> None:
        Deployment(self.prefix)
        _check(_UID, self.uid, "uid", "lower-case letters, digits and '-', at most 63")

    # Redis keys.

    def stream(self, stream: Stream) -> str:
        """Return the Redis key of one of the run's streams."""
        return f"{self._key}:{stream.value}"

    @property
    def meta(self) -> str:
        """Return the Redis key of the hash with generation, format, run_hash, epoch:{role}, seq:{writer},
        base:{stream}.
        """
        return f"{self._key}:meta"

    def rebuilt_events(self, generation: int) -> str:
        """Return the Redis key of the stream that a rebuild fills and then renames to the events; it expires
        otherwise.
        """
        return f"{self.stream(Stream.EVENTS)}:rebuild:{generation}"

    def lease(self, role: str) -> str:
        """Return the Redis key of the string that says who holds a role of the run ("orchestrator", …); it expires."""
        return f"{self._key}:lease:{role}"

    def lease_end(self, role: str) -> str:
        """Return the Redis key of what the last holder of a role wrote when it gave the role back; it expires."""
        return f"{self.lease(role)}:end"

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Return every Redis key of the run but the leases and their ends, which expire by themselves."""
        return (*(self.stream(stream) for stream in Stream), self.meta)

    # Objects.

    @property
    def root(self) -> str:
        """Return the prefix, with a slash at its end, of the key of every object of the run."""
        return f"{self.prefix}/runs/{self.uid}/"

    @property
    def run_json(self) -> str:
        """Return the object key of the run's record: what the run is (resolved config, hash, kind, request id, …)."""
        return self._object(catalogue.RUN_JSON)

    @property
    def tombstone(self) -> str:
        """Return the key of the object whose existence means that the run is being deleted; it is removed last."""
        return self._object(catalogue.TOMBSTONE)

    @property
    def all_epochs(self) -> str:
        """Return the prefix of the object keys of the epochs of every role."""
        return self._folder(catalogue.EPOCH)

    def epochs(self, role: str) -> str:
        """Return the prefix of the epochs of a role ("orchestrator", "trainer", …)."""
        return f"{self.all_epochs}{role}/"

    def epoch(self, role: str, number: int) -> str:
        """Return the key of the create-only object that says who holds this epoch of the role."""
        return self._object(catalogue.EPOCH, role=role, number=number)

    @property
    def generations(self) -> str:
        """Return the prefix of the object keys of the marks of installed generations."""
        return self._folder(catalogue.GENERATION)

    def generation(self, number: int) -> str:
        """Return the key of the create-only mark that this generation of the Redis copy was installed."""
        return self._object(catalogue.GENERATION, number=number)

    @property
    def event_archive(self) -> str:
        """Return the prefix of the object keys of the archived events."""
        return self._folder(catalogue.EVENT_ARCHIVE)

    def archived_events(self, first: str, last: str) -> str:
        """Return the key of the create-only archive of the events with the ids from `first` to `last`, such as `1-0`
        and `1-17`.
        """
        (a, b), (c, d) = (map(int, id_.split("-")) for id_ in (first, last))
        return self._object(catalogue.EVENT_ARCHIVE, first=a, first_place=b, last=c, last_place=d)

    @property
    def intents(self) -> str:
        """Return the prefix of the object keys of the intents."""
        return self._folder(catalogue.INTENT)

    def intent(self, sequence: int) -> str:
        """Return the key of one create-only intent of a user (pause, resume, cancel, config update), numbered from
        1.
        """
        return self._object(catalogue.INTENT, number=sequence)

    @property
    def reopenings(self) -> str:
        """Return the prefix of the object keys of the records that reopened the run."""
        return self._folder(catalogue.REOPENING)

    @property
    def seals(self) -> str:
        """Return the prefix of the object keys of the seals."""
        return self._folder(catalogue.SEAL)

    def seal(self, number: int) -> str:
        """Return the key of the create-only seal of the run's end, after it was reopened `number` times.

        A seal says what the run consists of.
        """
        return self._object(catalogue.SEAL, number=number)

    @property
    def retirements(self) -> str:
        """Return the prefix of the object keys of the records of what retention has removed."""
        return self._folder(catalogue.RETIREMENT)

    def retirement(self, number: int) -> str:
        """Return the key of the create-only record of one pass of retention, numbered from 1."""
        return self._object(catalogue.RETIREMENT, number=number)

    @property
    def attestations(self) -> str:
        """Return the prefix of the object keys of the attestations."""
        return self._folder(catalogue.ATTESTATION)

    def attestation(self, number: int) -> str:
        """Return the key of a create-only signed chain hash, numbered from 1."""
        return self._object(catalogue.ATTESTATION, number=number)

    @property
    def batches(self) -> str:
        """Return the prefix of batch headers and of the chunks of batches."""
        return self._folder(catalogue.BATCH_HEADER)

    def batch_header(self, step: int, revision: int = 0) -> str:
        """Return the key of a batch's create-only header, its commit point; batches are counted from 0.

        A `revision` from 1 on is that of the successor of a failed closing header.
        """
        return revision_key(self._object(catalogue.BATCH_HEADER, step=step), revision)

    @property
    def chain_points(self) -> str:
        """Return the prefix of the object keys of the chain points."""
        return self._folder(catalogue.CHAIN_POINT)

    def chain_point(self, step: int) -> str:
        """Return the key of the create-only chain point after a step: what a successor needs of the headers up to
        that step.
        """
        return self._object(catalogue.CHAIN_POINT, step=step)

    def quarantined(self, key: str, sha256: str) -> str:
        """Return the key under which `run repair` keeps the damaged bytes of the object `key`.

        `key` is whole, of this run or of the deployment; `sha256` (hex) is of the damaged bytes.
        """
        own = key.removeprefix(self.root) if key.startswith(self.root) else f"deployment/{key}"
        return self._object(catalogue.QUARANTINED, key=own, sha256=sha256[:16])

    def reopened(self, number: int) -> str:
        """Return the key of the create-only record, numbered from 1, that a closing header does not end the run."""
        return self._object(catalogue.REOPENING, number=number)

    def batch_data(self, step: int, epoch: int, nonce: str) -> str:
        """Return the prefix of the chunks that one writer uploads for a step: `nonce` is random text of that writer."""
        return f"{self.batches}{step:08d}/e{epoch:08d}-{nonce}/"

    def rollout_data(self, step: int, epoch: int, nonce: str) -> str:
        """Return the prefix of the archive of the rollouts that a step resolves, as one writer (`nonce`) uploads it."""
        return f"{self.root}rollouts/{step:08d}/e{epoch:08d}-{nonce}/"

    def scores(self, digest: str) -> str:
        """Return the key of a teacher's log-probs of one rollout's tokens, by the digest of those tokens.

        The object is written before the rollout's entry.
        """
        return self._object(catalogue.SCORES, digest=digest)

    def token_logs(self, step: int) -> str:
        """Return the prefix of the object keys of what the trainer computed of a step's tokens."""
        return f"{self.root}token_logs/{step:08d}/"

    def token_log(self, step: int, lineage: int) -> str:
        """Return the key of the log-probs and entropies that a lineage's trainer computed of a step's tokens."""
        return self._object(catalogue.TOKEN_LOG, step=step, lineage=lineage)

    @property
    def policies(self) -> str:
        """Return the prefix of the object keys of the published policies."""
        return self._folder(catalogue.POLICY_MANIFEST)

    def policy(self, lineage: int, version: int) -> str:
        """Return the prefix of one policy version of a lineage."""
        return f"{self.policies}{lineage:04d}-{version:08d}/"

    def policy_manifest(self, lineage: int, version: int) -> str:
        """Return the key of a policy version's create-only commit point."""
        return self._object(catalogue.POLICY_MANIFEST, lineage=lineage, version=version)

    @property
    def checkpoints(self) -> str:
        """Return the prefix of the object keys of the checkpoints."""
        return self._folder(catalogue.CHECKPOINT_MANIFEST)

    def checkpoint(self, step: int) -> str:
        """Return the prefix of the checkpoint after `step` steps, which is of policy version `step`."""
        return f"{self.checkpoints}{step:08d}/"

    def checkpoint_manifest(self, step: int) -> str:
        """Return the key of the create-only commit point of the checkpoint after `step` steps."""
        return self._object(catalogue.CHECKPOINT_MANIFEST, step=step)

    def _folder(self, kind: catalogue.ObjectKind) -> str:
        """Return the whole prefix of the keys of a kind."""
        return self.root + kind.folder

    def _object(self, kind: catalogue.ObjectKind, **fields: object) -> str:
        """Return the whole key of an object of a kind; `fields` are the numbers and texts in it."""
        return self.root + kind.path(**fields)

    @property
    def _key(self) -> str:
        """Return the beginning of every Redis key of the run, with the uid as hash tag."""
        return f"{self.prefix}:{{{self.uid}}}"


def _check(pattern: re.Pattern[str], value: str, field: str, rule: str) -> str:
    """Return `value` if it fits the pattern, else raise InvalidSpecError naming `field`, with the `rule` in words."""
    if not pattern.fullmatch(value):
        raise InvalidSpecError([Violation(field=field, value=value[:200], message=f"must be {rule}", source="request")])
    return value


# How runs are named: one function makes a name, one finds the run that is meant by one.

MAX_NAME = 63
"""Most characters of a name: it becomes part of object keys, of labels and of host names."""
RULE = f"lower-case letters, digits and '-', begins with a letter, at most {MAX_NAME}, no '-' at its end"
_LEGAL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def is_legal(name: str) -> bool:
    """Return whether a new run may have this name."""
    return _LEGAL.fullmatch(name) is not None


def is_uid(text: str) -> bool:
    """Return whether a text has the form of a uid."""
    return _UID.fullmatch(text) is not None


# The names of a tenant's runs and requests begin with the tenant and a dot, which no name that a user chooses has.


def of_tenant(tenant: str, name: str) -> str:
    """Return the whole name of what a tenant calls `name`; an operator's, whose `tenant` is empty, is that name."""
    return f"{tenant}.{name}" if tenant else name


def tenant_of(name: str) -> str:
    """Return the tenant that a whole name begins with; empty if it is an operator's."""
    return name.partition(".")[0] if "." in name else ""


def within(tenant: str, name: str) -> str:
    """Return a name as its tenant may write it, without the tenant in front of it; another name as it is."""
    return name.removeprefix(f"{tenant}.") if tenant else name


def suggest(text: str) -> str:
    """Return a legal run name made of a text, such as `fork-a` of `forkA`; empty if the text has no letter."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", text).lower()
    words = re.sub(r"[^a-z0-9]+", "-", words).lstrip("-0123456789")
    return words[:MAX_NAME].rstrip("-")


def make(
    stem: str, tail: str = "", *, is_taken: Callable[[str], bool] = lambda name: False, most: int = MAX_NAME
) -> str:
    """Return a legal run name that is free: `{stem}-{tail}`, or `stem` alone, with the stem cut where more than `most`
    characters would be needed.

    If that is taken (`is_taken`), it ends in `-2`, `-3`, …, the first that is free.
    """
    words = stem if is_legal(stem) else re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "run"
    words = words if words[0].isalpha() else f"run-{words}"
    number = 1
    while is_taken(name := _joined(words, tail, str(number) if number > 1 else "", most=most)):
        number += 1
    return name


def resolve(
    text: str,
    runs: Mapping[str, str],
    *,
    is_exact: bool = False,
    holder: str = "there is",
    remedy: str = "see what there is with `millrace run list`",
) -> str:
    """Return the name of the run that `text` means, of `runs` (uid by name).

    Runs are named by their name, `runs/{name}` or uid and, unless `is_exact`, by the unique beginning of a name or by
    `-`, the newest run. NotFoundError ("{holder} no run …") with a did-you-mean or the `remedy`, InvalidSpecError if
    several names begin like this.
    """
    wanted = text.removeprefix("runs/")
    if wanted == "-" and not is_exact:
        if not runs:
            raise NotFoundError(
                f"{holder} no run yet",
                reason="RUN_NOT_FOUND",
                remedy="submit one: millrace run submit @ examples/reverse_text/rl.toml",
            )
        return max(runs, key=runs.__getitem__)  # uids sort by creation
    if wanted in runs:
        return wanted
    if (named := next((name for name, uid in runs.items() if uid == wanted), None)) is not None:
        return named
    near = sorted(name for name in runs if wanted and name.startswith(wanted))
    if near and not is_exact:
        if len(near) == 1:
            return near[0]
        message = f"{wanted!r} begins the names of {len(near)} runs: {', '.join(near[:8])}"
        raise InvalidSpecError([Violation(field="run", message=message)], remedy="type more of it")
    close = difflib.get_close_matches(wanted, runs, n=3)
    raise NotFoundError(
        f"run {wanted!r} does not exist" if is_exact else f"{holder} no run {wanted!r}",
        reason="RUN_NOT_FOUND",
        remedy=f"did you mean {' or '.join(close)}?" if close else remedy,
        metadata={"run": wanted},
    )


def _joined(stem: str, *tails: str, most: int) -> str:
    """Return `stem` and the tails that are not empty, joined by '-', with the stem cut to `most` characters in all."""
    tail = "".join(f"-{each}" for each in tails if each)
    return f"{stem[: most - len(tail)].rstrip('-')}{tail}"
