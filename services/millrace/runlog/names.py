"""Every name of a run: Redis keys and object keys, in one place.

Keys are `{prefix}:{uid}:…` with a Redis Cluster hash tag around the uid only, so that one run lives in one slot.
Objects are `{prefix}/runs/{uid}/…`. These names are the stored format of a deployment: never change one.
"""

import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum

from millrace.errors import InvalidSpecError, Violation
from millrace.storage.commit_points import revision_key

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
    """A run uid that is never reused: 48 bits of milliseconds, then 64 random bits, hex; sorts by creation."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def check_run_name(name: str) -> str:
    """Return a legal run name (letters, digits, '.', '_', '-', at most 63), else raise `InvalidSpecError`."""
    return _check(_RUN_NAME, name, "run.name", "letters, digits, '.', '_', '-', at most 63, ends alphanumeric")


def check_request_id(request_id: str) -> str:
    """Return a legal request id (at most 128 of letters, digits, '.', '_', '-'), else raise `InvalidSpecError`."""
    return _check(_REQUEST_ID, request_id, "request_id", "1 to 128 letters, digits, '.', '_', '-'")


def rollout_id(step: int, revision: int, place: int) -> str:
    """What names a rollout in lists: the step and revision of the header that resolved it, its place in the archive."""
    return f"{step}{f'r{revision}' if revision else ''}-{place}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Names that belong to a deployment or tenant rather than to one run."""

    prefix: str

    def __post_init__(self) -> None:
        _check(
            _PREFIX,
            self.prefix,
            "MILLRACE_PREFIX",
            "1 to 63 of a-z, 0-9, '.', '_', '-', and start with a letter or digit",
        )

    @property
    def runs_key(self) -> str:
        """Redis hash run name → uid; in another slot than the runs, never in one script with their keys."""
        return f"{self.prefix}:runs"

    @property
    def names_prefix(self) -> str:
        """Prefix of the create-only objects that make run names unique."""
        return f"{self.prefix}/names/"

    def name_object(self, name: str) -> str:
        """Create-only object that holds the uid of the run called `name`."""
        return f"{self.names_prefix}{check_run_name(name)}"

    @property
    def requests_prefix(self) -> str:
        """Prefix of the create-only objects that make requests unique."""
        return f"{self.prefix}/requests/"

    def request_object(self, request_id: str) -> str:
        """Create-only object that holds the uid that a request created."""
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
        """Key of a stream."""
        return f"{self._key}:{stream.value}"

    @property
    def meta(self) -> str:
        """Hash: generation, format, run_hash, epoch:{role}, seq:{writer}, base:{stream}."""
        return f"{self._key}:meta"

    def rebuilt_events(self, generation: int) -> str:
        """Stream that a rebuild fills and then renames to the events; expires if it does not get to that."""
        return f"{self.stream(Stream.EVENTS)}:rebuild:{generation}"

    def lease(self, role: str) -> str:
        """String with the holder of a role; expires."""
        return f"{self._key}:lease:{role}"

    def lease_end(self, role: str) -> str:
        """String with the last words of the last holder of a role that gave it back; expires."""
        return f"{self.lease(role)}:end"

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every Redis key of the run but the leases and their ends, which expire by themselves."""
        return (*(self.stream(stream) for stream in Stream), self.meta)

    # Objects.

    @property
    def root(self) -> str:
        """Prefix of every object of the run."""
        return f"{self.prefix}/runs/{self.uid}/"

    @property
    def run_json(self) -> str:
        """Create-only: what the run is (resolved config, hash, kind, request id, ...)."""
        return f"{self.root}run.json"

    @property
    def tombstone(self) -> str:
        """Its existence says that the run is being deleted; removed last."""
        return f"{self.root}tombstone.json"

    @property
    def all_epochs(self) -> str:
        """Prefix of the epochs of every role."""
        return f"{self.root}epochs/"

    def epochs(self, role: str) -> str:
        """Prefix of a role's epochs."""
        return f"{self.all_epochs}{role}/"

    def epoch(self, role: str, number: int) -> str:
        """Create-only: who holds this epoch of the role."""
        return f"{self.epochs(role)}{number:08d}"

    @property
    def generations(self) -> str:
        """Prefix of the marks of installed generations."""
        return f"{self.root}generations/"

    def generation(self, number: int) -> str:
        """Create-only: this generation of the Redis copy was installed."""
        return f"{self.generations}{number:08d}"

    @property
    def event_archive(self) -> str:
        """Prefix of the archived events."""
        return f"{self.root}events/"

    def archived_events(self, first: str, last: str) -> str:
        """Create-only: the events with the ids from `first` to `last`, such as `1-0` and `1-17`."""
        return f"{self.event_archive}{'_'.join(_sortable(id_) for id_ in (first, last))}.zst"

    @property
    def intents(self) -> str:
        """Prefix of the intents."""
        return f"{self.root}intents/"

    def intent(self, sequence: int) -> str:
        """Create-only: one acknowledged intent (pause, resume, cancel, config update)."""
        return f"{self.intents}{sequence:08d}.json"

    @property
    def reopenings(self) -> str:
        """Prefix of the records that reopened the run."""
        return f"{self.root}reopened/"

    @property
    def seals(self) -> str:
        """Prefix of the seals."""
        return f"{self.root}seals/"

    def seal(self, number: int) -> str:
        """Create-only: what the run consists of at its end, after it was reopened `number` times."""
        return f"{self.seals}{number:08d}.json"

    @property
    def attestations(self) -> str:
        """Prefix of the attestations."""
        return f"{self.root}attestations/"

    def attestation(self, number: int) -> str:
        """Create-only: a signed chain hash, numbered from 1."""
        return f"{self.attestations}{number:08d}.json"

    @property
    def batches(self) -> str:
        """Prefix of headers and batch data."""
        return f"{self.root}batches/"

    def batch_header(self, step: int, revision: int = 0) -> str:
        """Create-only commit point of a step; from revision 1 on the successor of a failed closing header."""
        return revision_key(f"{self.batches}{step:08d}.pb", revision)

    def quarantined(self, key: str, sha256: str) -> str:
        """Where `run repair` keeps the bytes of a damaged object of the deployment; sha256 in hex."""
        own = key.removeprefix(self.root) if key.startswith(self.root) else f"deployment/{key}"
        return f"{self.root}quarantine/{own}.{sha256[:16]}"

    def reopened(self, number: int) -> str:
        """Create-only: the closing header that it names does not end the run; numbered from 1."""
        return f"{self.reopenings}{number:08d}.json"

    def batch_data(self, step: int, epoch: int, nonce: str) -> str:
        """Prefix of the chunks that one writer uploads for a step."""
        return f"{self.batches}{step:08d}/e{epoch:08d}-{nonce}/"

    def rollout_data(self, step: int, epoch: int, nonce: str) -> str:
        """Prefix of the archive of the rollouts that a step resolves; kept longer than batch data."""
        return f"{self.root}rollouts/{step:08d}/e{epoch:08d}-{nonce}/"

    def scores(self, digest: str) -> str:
        """A teacher's log-probs of one rollout's tokens, by the digest of those tokens; written before its entry."""
        return f"{self.root}scores/{digest}.bin"

    def token_logs(self, step: int) -> str:
        """Prefix of what the trainer computed of a step's tokens."""
        return f"{self.root}token_logs/{step:08d}/"

    def token_log(self, step: int, lineage: int) -> str:
        """Create-only: log-probs and entropies of sampled tokens of a step, by the trainer of a lineage."""
        return f"{self.token_logs(step)}{lineage:04d}.bin"

    @property
    def policies(self) -> str:
        """Prefix of the published policies."""
        return f"{self.root}policies/"

    def policy(self, lineage: int, version: int) -> str:
        """Prefix of one policy version."""
        return f"{self.policies}{lineage:04d}-{version:08d}/"

    def policy_manifest(self, lineage: int, version: int) -> str:
        """Create-only commit point of a policy version."""
        return f"{self.policy(lineage, version)}manifest.json"

    @property
    def checkpoints(self) -> str:
        """Prefix of the checkpoints."""
        return f"{self.root}checkpoints/"

    def checkpoint(self, step: int) -> str:
        """Prefix of the checkpoint that is version `step`."""
        return f"{self.checkpoints}{step:08d}/"

    def checkpoint_manifest(self, step: int) -> str:
        """Create-only commit point of a checkpoint."""
        return f"{self.checkpoint(step)}manifest.json"

    @property
    def _key(self) -> str:
        return f"{self.prefix}:{{{self.uid}}}"


def _sortable(id_: str) -> str:
    """An entry id that sorts as text."""
    major, _, minor = id_.partition("-")
    return f"{int(major):08d}-{int(minor):012d}"


def _check(pattern: re.Pattern[str], value: str, field: str, rule: str) -> str:
    if not pattern.fullmatch(value):
        raise InvalidSpecError([Violation(field=field, value=value[:200], message=f"must be {rule}", source="request")])
    return value
