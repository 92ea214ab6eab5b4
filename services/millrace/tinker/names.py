"""Ids that the SDK sees, and the keys of what is stored for them.

    {prefix}/tinker/{tenant}/{session}/
        session.json                              what a session is
        train-{number}/verbs/{seq_id}.pb          requests of a model, create-only
        train-{number}/results/{seq_id}.pb        their results
        train-{number}/states/{seq_id}/full.*     adapter, optimizer, gradients after a request
        train-{number}/states/{seq_id}/adapter.*  adapter alone, for samplers
        train-{number}/checkpoints/{folder}/{name}/{seq_id}.json   a state with a name
        samplers/{number}.json                    a sampling session and its weights
        sample-{number}/requests/{seq_id}.json    requests for samples
        sample-{number}/results/{seq_id}.pb       their results

Every key begins with its tenant, so that an id of another tenant is an id of nothing.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Self

from millrace.errors import NotFoundError

_SESSION = re.compile(r"s-[0-9a-f]{32}")
_NUMBER = r"(?P<number>0|[1-9][0-9]{0,8})"
_MODEL = re.compile(rf"(?P<session>{_SESSION.pattern}):train:{_NUMBER}")
_SAMPLER = re.compile(rf"(?P<session>{_SESSION.pattern}):sample:{_NUMBER}")
_CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://(?P<model>[^/]+)/(?P<folder>weights|sampler_weights)/(?P<name>[^/]+)")

MAX_NUMBER = 99_999_999
"""Largest number of a model or sampling session in its session, and largest seq_id of a model."""
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
"""Folders of checkpoints, as paths of the SDK have them."""


def tenant_folder(tenant: str) -> str:
    """Return the folder of a tenant; the empty one is that of the operators."""
    return f"tenant-{tenant}" if tenant else "operators"


def unknown(what: str, name: object) -> NotFoundError:
    """Make the error for an id of nothing, or of another tenant's; `what` is the kind of thing, such as "model"."""
    return NotFoundError(
        f"there is no {what} {str(name)[:200]!r}",
        reason="NOT_FOUND",
        remedy="see the id, and that the API key is the one with which it was made",
    )


@dataclass(frozen=True, slots=True)
class SessionName:
    """One session of a client."""

    prefix: str
    tenant: str
    session: str

    @classmethod
    def new(cls, prefix: str, tenant: str) -> Self:
        """Return the name of a new session."""
        return cls(prefix, tenant, f"s-{secrets.token_hex(16)}")

    @classmethod
    def parse(cls, prefix: str, tenant: str, session: object) -> Self:
        """Return the name of the session with this id; NotFoundError for a malformed one."""
        if not isinstance(session, str) or not _SESSION.fullmatch(session):
            raise unknown("session", session)
        return cls(prefix, tenant, session)

    @property
    def root(self) -> str:
        """Return the prefix, with a slash at its end, of all keys of the session."""
        return f"{self.prefix}/tinker/{tenant_folder(self.tenant)}/{self.session}/"

    @property
    def record(self) -> str:
        """Return the key of the session's record."""
        return f"{self.root}session.json"


@dataclass(frozen=True, slots=True)
class ModelName:
    """One model: a base with an adapter that is trained."""

    home: SessionName
    number: int

    @classmethod
    def parse(cls, prefix: str, tenant: str, model_id: object) -> Self:
        """Return the name of the model with this id, `{session}:train:{number}`; NotFoundError for a malformed one."""
        match = _MODEL.fullmatch(model_id) if isinstance(model_id, str) else None
        if match is None:
            raise unknown("model", model_id)
        return cls(SessionName(prefix, tenant, match["session"]), int(match["number"]))

    @property
    def id(self) -> str:
        """Return the id that the SDK has."""
        return f"{self.home.session}:train:{self.number}"

    @property
    def root(self) -> str:
        """Return the prefix, with a slash at its end, of all keys of the model."""
        return f"{self.home.root}train-{self.number:08d}/"

    def verb(self, seq_id: int) -> str:
        """Return the key of a request."""
        return f"{self.root}verbs/{seq_id:08d}.pb"

    def result(self, seq_id: int) -> str:
        """Return the key of a request's result."""
        return f"{self.root}results/{seq_id:08d}.pb"

    @property
    def states(self) -> str:
        """Return the prefix of all states."""
        return f"{self.root}states/"

    def state(self, seq_id: int, kind: str) -> str:
        """Return the key, without its ending, of the state after a request; `kind` is `full` or `adapter`."""
        return f"{self.states}{seq_id:08d}/{kind}"

    @property
    def checkpoints(self) -> str:
        """Return the prefix of all checkpoints."""
        return f"{self.root}checkpoints/"

    def checkpoint(self, folder: str, name: str, seq_id: int) -> str:
        """Return the key of the checkpoint that a request made; of equal names the largest `seq_id` counts."""
        return f"{self.checkpoints}{folder}/{name}/{seq_id:08d}.json"


@dataclass(frozen=True, slots=True)
class SamplerName:
    """One sampling session: weights that do not change."""

    home: SessionName
    number: int

    @classmethod
    def parse(cls, prefix: str, tenant: str, sampler_id: object) -> Self:
        """Return the name of the sampling session with this id; NotFoundError for a malformed one."""
        match = _SAMPLER.fullmatch(sampler_id) if isinstance(sampler_id, str) else None
        if match is None:
            raise unknown("sampling session", sampler_id)
        return cls(SessionName(prefix, tenant, match["session"]), int(match["number"]))

    @property
    def id(self) -> str:
        """Return the id that the SDK has."""
        return f"{self.home.session}:sample:{self.number}"

    @property
    def record(self) -> str:
        """Return the key of the sampling session's record."""
        return f"{self.home.root}samplers/{self.number:08d}.json"

    def request(self, seq_id: int) -> str:
        """Return the key of a request for samples."""
        return f"{self.home.root}sample-{self.number:08d}/requests/{seq_id:019d}.json"

    def result(self, seq_id: int) -> str:
        """Return the key of the result of a request for samples."""
        return f"{self.home.root}sample-{self.number:08d}/results/{seq_id:019d}.pb"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The path of a checkpoint, `tinker://{model}/{folder}/{name}`."""

    model_id: str
    folder: str
    name: str

    @classmethod
    def parse(cls, path: object) -> Self:
        """Return the parts of a path; NotFoundError for a malformed one."""
        match = _PATH.fullmatch(path) if isinstance(path, str) else None
        if match is None or not is_checkpoint_name(match["name"]):
            raise unknown("checkpoint", path)
        return cls(match["model"], match["folder"], match["name"])

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.folder}/{self.name}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether a checkpoint may have this name: 1 to 128 letters, digits, '.', '_', '-'."""
    return _CHECKPOINT.fullmatch(name) is not None
