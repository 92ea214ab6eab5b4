"""The publishing process: `python -m millrace.trainer.publish.share_main FD PARENT`, started by `share_process`.

It maps its trainer's snapshots, and compares, encodes and uploads their parts as requested, until the trainer is gone.
The store is that of MILLRACE_STORE_URL, with the credentials of the environment.
"""

import logging
import os
from typing import Any, NoReturn

import numpy as np

from millrace.errors import InternalError, MillraceError
from millrace.policies.publish import TensorPart
from millrace.policies.share import LocalShareWriter
from millrace.policies.tensors import bits_type
from millrace.processes import channel
from millrace.processes.channel import Message
from millrace.processes.lifeline import run_service
from millrace.processes.shared_memory import map_read_only
from millrace.rpc.status import to_text
from millrace.storage import open_store
from millrace.telemetry import waits
from millrace.telemetry.logging import FILE_VARIABLE, setup
from millrace.telemetry.settings import Settings

logger = logging.getLogger(__name__)


class ShareServer:
    """Handles the trainer's requests, one after the other."""

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url
        self._writer: LocalShareWriter | None = None
        self._run = ""
        self._memory: dict[int, memoryview] = {}
        """The mapped memory, by the trainer's numbers."""

    def answer(self, question: Message, files: list[int]) -> Message:
        """Map new memory, unmap what is not kept, do a request, and return its result or its error.

        `files` are the descriptors of the new memory, in the order of the request's `new`.
        """
        kept = set(question["kept"])
        for (number, size_bytes), file in zip(question["new"], files, strict=True):
            self._memory[number] = map_read_only(file, size_bytes)
        self._memory = {number: memory for number, memory in self._memory.items() if number in kept}
        try:
            with waits.of_run(question.get("run", self._run)):
                return self._do(question)
        except MillraceError as error:
            failure = error
        except Exception as error:  # the process edge: the trainer raises it
            logger.exception("publishing failed with an unexpected error")
            failure = InternalError(f"publishing failed: {type(error).__name__}: {error}")
        return {"error": to_text(failure)}

    def _do(self, question: Message) -> Message:
        version = question["version"]
        if question["do"] == "begin":
            store = open_store(self._store_url)
            self._run = question["run"]
            self._writer = LocalShareWriter(store, skip_deltas=question["skip_deltas"], threads=question["threads"])
            return {}
        assert self._writer is not None, "it begins with `begin`"
        parts = [self._part(*each) for each in question["parts"]]
        match question["do"]:
            case "digests":
                digests = self._writer.digests(parts, version)
                return {"digests": [format(digests[part.name], "x") for part in parts]}
            case "encode":
                encoded = self._writer.encode(parts, version)
                deltas = [
                    {"base": delta.base, "num_changed": delta.num_changed, "size_bytes": delta.size_bytes}
                    for delta in encoded.deltas
                ]
                return {"digests": [format(encoded.digests[part.name], "x") for part in parts], "deltas": deltas}
            case "upload":
                prefix, is_anchor, bases = question["prefix"], question["is_anchor"], question["bases"]
                encodings = self._writer.upload(prefix, parts, version, is_anchor=is_anchor, bases=bases)
                return {"encodings": encodings}
            case "advance":
                named = zip((part.name for part in parts), question["digests"], strict=True)
                digests = {name: int(digest, 16) for name, digest in named}
                self._writer.advance(parts, version, digest=question["digest"], digests=digests)
                return {}
            case other:
                raise InternalError(f"the process that publishes knows no {other!r}")

    def _part(
        self, name: str, dtype: str, shape: list[int], start: int, count: int, memory: int, offset: int
    ) -> TensorPart:
        kind = bits_type(dtype)
        bits: Any = np.empty(0, kind)
        if count:
            bits = np.frombuffer(self._memory[memory], kind, count, offset)
        return TensorPart(name=name, dtype=dtype, shape=tuple(shape), start=start, bits=bits)


def beat() -> Message:
    """Return the longest wait of this process: reason, component waited for, and the age at which it is overdue."""
    return {"waits": [[wait.reason[:500], wait.waits_on, wait.deadline_s] for wait in waits.snapshot("")[:1]]}


def _serve() -> NoReturn:
    settings = Settings.from_env(os.environ, required=["store_url"])
    environ = {
        name: text for name, text in os.environ.items() if name != FILE_VARIABLE
    }  # the trainer rotates that file
    setup("trainer", level=settings.log_level, json_lines=settings.log_json, environ=environ)
    server = ShareServer(settings.require("store_url"))
    channel.serve(server.answer, beat=beat)


def main() -> NoReturn:
    """Serve the trainer's requests until the trainer is gone."""
    run_service(_serve)


if __name__ == "__main__":
    main()
