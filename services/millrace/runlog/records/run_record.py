"""The record of a run, `run.json`: written once, when the run is made, and parsed here only."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import from_resolved
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.v1 import run_pb2

RL, EVAL, UNKNOWN = "RL", "EVAL", "UNSPECIFIED"
"""Kinds of runs, as `run.json` names them; the last one where it cannot be read."""
REMEDY = "restore the object from a replica of the bucket"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The immutable part of a run. A field that the document does not have is empty."""

    uid: str = ""
    name: str = ""
    kind: str = ""
    config: dict[str, Any] | None = None
    run_hash: str = ""
    request_id: str = ""
    create_time: str = ""
    code_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    """For a fork: where it begins, as `records.origin` reads it."""

    @classmethod
    def parse(cls, data: bytes, *, where: str, needs: Collection[str] = ()) -> Self:
        """Parse what is there; `CorruptObjectError` names the document by `where`. Unknown fields are ignored.

        A field of `needs` that is missing is an error, and one of another type, unless it is only shown.
        """
        document = decode_object(data, what=where, reason="RUN_JSON_CORRUPT", remedy=REMEDY)
        found: dict[str, Any] = {}
        for name, kind in _TYPES.items():
            if (value := document.get(name)) is None and name not in needs:
                continue
            if not isinstance(value, kind):
                if name in _ONLY_SHOWN and name not in needs:
                    continue
                raise CorruptObjectError(f"{where} has no usable {name}", reason="RUN_JSON_CORRUPT", remedy=REMEDY)
            found[name] = value
        return cls(**found)

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Parse the record of a run that shall be shown or driven: every field must be there and make sense."""
        record = cls.parse(data, where=where, needs=_TYPES.keys() - {"parent"})
        try:
            record.describe()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptObjectError(f"{where} holds no run: {error!r}"[:500], reason="RUN_JSON_CORRUPT") from error
        return record

    @classmethod
    def unreadable(cls, uid: str, name: str) -> Self:
        """What stands for a run whose `run.json` cannot be read."""
        return cls(uid=uid, name=name, kind=UNKNOWN, config={})

    def encode(self) -> bytes:
        """Canonical JSON; `parent` only where there is one."""
        document = {name: getattr(self, name) for name in _TYPES}
        if self.parent is None:
            del document["parent"]
        return json.dumps(document, sort_keys=True, indent=1).encode()

    @property
    def config_json(self) -> str:
        """The resolved config as canonical JSON."""
        return json.dumps(self.config, sort_keys=True)

    @cached_property
    def settings(self) -> RLConfig | EvalRunConfig:
        """The config, typed; ValueError if it is of another release."""
        return from_resolved(self.config or {}, EvalRunConfig if self.kind == EVAL else RLConfig)

    @property
    def training(self) -> RLConfig:
        """The config of a run that trains; ValueError for another one."""
        if not isinstance(self.settings, RLConfig):
            raise ValueError(f"run {self.name} trains nothing")
        return self.settings

    def describe(self) -> run_pb2.Run:
        """The run as the public API shows it before its first event."""
        run = run_pb2.Run(
            name=f"runs/{self.name}",
            uid=self.uid,
            kind=f"RUN_KIND_{self.kind}",
            state=run_pb2.RUN_STATE_QUEUED,
            config_json=self.config_json,
            run_hash=self.run_hash,
            labels=self.labels,
        )
        if self.create_time:
            run.create_time.FromJsonString(self.create_time)
        max_steps = (self.config or {}).get("max_steps")
        run.progress.max_steps = max_steps if isinstance(max_steps, int) else 0
        if (parent := self.parent) is not None:
            run.parent.CopyFrom(
                run_pb2.RunParent(name=f"runs/{parent['name']}", uid=parent["uid"], step=parent["step"])
            )
            run.progress.step = run.progress.policy_version = parent["base_step"]
        return run


_TYPES: dict[str, type] = dict.fromkeys((each.name for each in fields(RunRecord)), str)
_TYPES |= {"config": dict, "labels": dict, "parent": dict}
_ONLY_SHOWN = {"labels", "create_time", "code_version"}
