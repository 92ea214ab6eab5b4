"""Every decoder of foreign bytes, as a target: how it is called, how its inputs are damaged, what must come back.

A target returns a value or raises a `MillraceError` (a decoder may name further errors that its callers take). Where
`encode` is given, what was decoded and encoded again must decode to something equal.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from millrace.errors import MillraceError
from millrace.runlog.catalogue import KINDS, ObjectKind
from millrace_testing.fuzz import mutate as m
from millrace_testing.repository import REPOSITORY

CORPUS = REPOSITORY / "tests" / "fuzz" / "corpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A decoder to fuzz. `load` returns its functions; their imports happen in the process that fuzzes."""

    name: str
    load: Callable[[], tuple[Callable[[bytes], Any], Callable[[Any], bytes] | None]]
    mutate: Callable[[], m.Mutate] = field(default=lambda: m.bytes_of)
    errors: tuple[type[BaseException], ...] = (MillraceError,)
    known: str = ""
    """Why failures are expected: somebody fixes them. Such a target is run and counted, and does not fail the lane."""
    answers_all: bool = True
    """Every input of the corpus decodes; else some may be refused."""
    max_s: float = 2.0
    """Longest time for one input."""
    weight: int = 1
    """Shares of the time that it gets."""

    def seeds(self) -> list[bytes]:
        """Return the inputs of this target in the corpus."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


def _of(module: str, name: str, *, encode: str = "", **more: Any) -> Callable[[], tuple[Any, Any]]:
    """Return a `load` function for `module.name(data, **more)`, and for `encode`, a method of the result or a function
    that takes it.
    """

    def load() -> tuple[Any, Any]:
        found: Any = importlib.import_module(f"millrace.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        back = None
        if encode.startswith("."):
            back = lambda value: getattr(value, encode[1:])()  # noqa: E731
        elif encode:
            back = getattr(importlib.import_module(f"millrace.{module}"), encode)
        return (lambda data: found(data, **more)), back

    return load


def _pb(module: str, name: str) -> Callable[[], m.Mutate]:
    return lambda: m.message_of(getattr(importlib.import_module(f"millrace.{module}"), name))


def _json() -> m.Mutate:
    return m.json_of


def _event() -> tuple[Any, Any]:
    from millrace.runlog.event_archive import decode_event
    from millrace.runlog.redis.entry import Entry

    return (lambda data: decode_event(Entry(id="1-7", v=2, h="", d=data, tp=""))), None


def _entry() -> tuple[Any, Any]:
    from millrace.runlog.redis.entry import decode_entry

    def decode(data: bytes) -> Any:
        parts = data.split(b"|", 4)
        names = (b"v", b"h", b"d", b"tp")
        return decode_entry("key", parts[0], dict(zip(names, parts[1:], strict=False)))

    return decode, None


def _entry_mutate() -> m.Mutate:
    def wrap(data: bytes) -> bytes:
        parts = data.split(b"|", 4)
        if len(parts) == 5:
            parts[2] = hashlib.sha256(parts[3]).hexdigest().encode()
        return b"|".join(parts)

    return m.wrapped(m.bytes_of, lambda data: data, wrap)


def _sealed_frame(body: bytes) -> bytes:
    lead = _delta_lead()
    return lead[:4] + struct.pack("<I", zlib.crc32(body)) + body


@cache
def _delta_lead() -> bytes:
    return (CORPUS / "delta_frame" / "0.bin").read_bytes()[:8]


def _delta() -> tuple[Any, Any]:
    from millrace.policies.delta_codec import decode_piece
    from millrace_testing.fuzz.seeds import delta_base

    base = delta_base()
    return (lambda data: decode_piece(data, base) and None), None


def _index() -> tuple[Any, Any]:
    from millrace.trainer.checkpoint.index import decode_index, encode_index
    from millrace_testing.fuzz.seeds import INDEX_SIZES

    return (lambda data: decode_index(data, sizes=INDEX_SIZES, source="x")), lambda v: encode_index(v.values())


def _config() -> tuple[Any, Any]:
    from millrace.config.load import validate_document

    return validate_document, lambda config: config.resolved_json().encode()


def _config_file(suffix: str) -> Callable[[], tuple[Any, Any]]:
    def load() -> tuple[Any, Any]:
        from millrace.config.load import load as load_config
        from millrace.config.sections.rl import RLConfig

        directory = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))

        def decode(data: bytes) -> Any:
            (directory / f"a{suffix}").write_bytes(data)
            return load_config(RLConfig, ["@", f"a{suffix}"], {}, cwd=directory) and None

        return decode, None

    return load


def _config_argv() -> tuple[Any, Any]:
    from millrace.config.load import load as load_config
    from millrace.config.sections.rl import RLConfig

    def decode(data: bytes) -> Any:
        line, _, variables = data.decode("utf-8", "surrogateescape").partition("\n\n")
        pairs = (text.partition("=") for text in variables.split("\n") if text)
        env = {f"MILLRACE_CONFIG__{name}": value for name, _, value in pairs}
        return load_config(RLConfig, [text for text in line.split("\n") if "@" not in text], env) and None

    return decode, None


def _frame() -> tuple[Any, Any]:
    from millrace.env_server.workers.frames import encode_frame, read_frame
    from millrace.internal.v1 import env_worker_pb2

    loop = asyncio.new_event_loop()

    async def read(data: bytes) -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, env_worker_pb2.WorkerReport)

    return (lambda data: loop.run_until_complete(read(data))), lambda v: b"" if v is None else encode_frame(v)


def _frame_mutate() -> m.Mutate:
    from millrace.internal.v1 import env_worker_pb2

    inner = m.message_of(env_worker_pb2.WorkerReport)
    return m.wrapped(inner, lambda data: data[4:], lambda body: struct.pack("<I", len(body)) + body)


def _status() -> tuple[Any, Any]:
    import grpc

    from millrace.rpc.status import from_rpc_error

    class Call(grpc.RpcError):
        def __init__(self, data: bytes) -> None:
            self.data = data

        def code(self) -> Any:
            return grpc.StatusCode.INVALID_ARGUMENT

        def details(self) -> str:
            return "x"

        def trailing_metadata(self) -> Any:
            return (("grpc-status-details-bin", self.data),)

    return (lambda data: str(from_rpc_error(Call(data))) and None), None


def _tokens() -> tuple[Any, Any]:
    from millrace.rpc.tokens import TokensFile

    path = Path(tempfile.mkdtemp(prefix="millrace-fuzz-")) / "tokens"

    def decode(data: bytes) -> Any:
        path.write_bytes(data)
        return TokensFile(path, field="MILLRACE_TOKENS_FILE").find("x")

    return decode, None


def _routed_experts() -> tuple[Any, Any]:
    from millrace.rollouts.routed_experts import from_answer, to_answer

    def decode(data: bytes) -> Any:
        return from_answer({"routed_experts": data.decode(errors="replace")}, num_tokens=5)

    return decode, lambda call: to_answer(call.experts).encode()


def _stack() -> tuple[Any, Any]:
    from millrace.cli.connection import stack_at

    path = Path(tempfile.mkdtemp(prefix="millrace-fuzz-")) / "stack.json"

    def decode(data: bytes) -> Any:
        path.write_bytes(data)
        return stack_at("127.0.0.1:1", path.parent)

    return decode, None


def _read_places() -> tuple[Any, Any]:
    from millrace.policies.tensors import read_places

    return (lambda data: read_places(data, source="x")), None


def _places_mutate() -> m.Mutate:
    def split(data: bytes) -> bytes:
        return data[8 : 8 + int.from_bytes(data[:8], "little")]

    return m.wrapped(m.json_of, split, lambda head: len(head).to_bytes(8, "little") + head + bytes(64))


def _data_file() -> tuple[Any, Any]:
    from millrace.trainer.sft.readers import RowReader

    path = Path(tempfile.mkdtemp(prefix="millrace-fuzz-")) / "rows"

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        return list(RowReader({}).read(path))

    return read, None


def _chat_parsers() -> tuple[Any, Any]:
    import orjson

    from millrace.inference.http.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, ChatParsers
    from millrace_testing.inference.parser_cases import TOOLS

    kinds = [ChatParsers(tool_calls=t, reasoning=r) for t in TOOL_CALL_PARSERS for r in (None, *REASONING_PARSERS)]

    def parse_completion(data: bytes) -> Any:
        text = data.decode("utf-8", "replace")
        for parsers in kinds:
            said = parsers.parse_completion(text, tools=TOOLS, template_kwargs={})
            if said is not None:
                orjson.dumps([said.content, said.reasoning, [orjson.loads(call.arguments) for call in said.calls]])

    return parse_completion, None


def _agents() -> tuple[Any, Any]:
    import orjson

    from millrace.env_server.agents.sessions import ROUTES, AgentSession

    loop = asyncio.new_event_loop()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    message = {"content": "a", "reasoning_content": "b", "tool_calls": [call]}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}

    async def ask(asked: Any) -> Any:
        orjson.dumps([asked.messages, asked.tools, asked.max_tokens, asked.stop])
        return reply

    def answer(data: bytes) -> Any:
        path, _, body = data.partition(b"\n")
        api = ROUTES.get(path.decode("latin-1"), ROUTES["/v1/responses"])
        answer = loop.run_until_complete(AgentSession(ask, model="m").answer(api, body, {}))
        assert answer.status in (200, 400), answer
        said = answer.body.decode()
        if not answer.streams:
            assert json.loads(said)
        elif said:
            assert said.endswith("\n\n")

    return answer, None


def _surface(name: str) -> Callable[[], tuple[Any, Any]]:
    def load() -> tuple[Any, Any]:
        from millrace_testing.fuzz import surface

        return getattr(surface, name)().call, None

    return load


def _pages() -> tuple[Any, Any]:
    from millrace_testing.fuzz.pages import Dashboard

    return Dashboard().call, None


def _pages_mutate() -> m.Mutate:
    from millrace_testing.fuzz.pages import damaged

    return damaged


def _grpc_mutate() -> m.Mutate:
    from millrace_testing.fuzz.surface import methods

    known = {path.encode(): m.message_of(kind) for path, kind in methods().items()}

    def mutate(rng: Any, data: bytes) -> bytes:
        path, _, body = data.partition(b"\n")
        return (path if path in known else next(iter(known))) + b"\n" + known.get(path, m.bytes_of)(rng, body)

    return mutate


def _http_mutate() -> m.Mutate:
    def mutate(rng: Any, data: bytes) -> bytes:
        from millrace_testing.fuzz.surface import HTTP_BODIES

        path, _, body = data.partition(b"\n")
        path = path if path.decode("latin-1") in HTTP_BODIES else b"/v1/completions"
        return path + b"\n" + m.json_of(rng, body)

    return mutate


def _agents_mutate() -> m.Mutate:
    def mutate(rng: Any, data: bytes) -> bytes:
        path, _, body = data.partition(b"\n")
        return path + b"\n" + m.json_of(rng, body)

    return mutate


def of_kind(kind: ObjectKind) -> Target:
    """Return the target for a kind in the catalogue: its codec.

    If its module also writes it, encoding is checked, too.
    """

    def load() -> tuple[Any, Any]:
        module, name = kind.codec.split(":")
        writer = getattr(importlib.import_module(module), name.replace("decode_", "encode_", 1), None)
        if writer is not None and len(inspect.signature(writer).parameters) != 1:
            writer = None  # it needs more than what was read

        def decode(data: bytes) -> bytes | None:
            value = kind.decode(data, where="x")
            if isinstance(value, Message):
                return value.SerializeToString(deterministic=True)
            if writer is not None:
                return writer(value)
            method = getattr(value, "encode", None) or getattr(value, "to_bytes", None)
            return None if method is None or isinstance(value, str) else method()

        return decode, lambda data: data

    def mutate() -> m.Mutate:
        module, _, name = kind.message.partition(":")
        return m.stored_of(getattr(importlib.import_module(module), name) if name else None)

    return Target(name=fuzz_name(kind), load=load, mutate=mutate)


def fuzz_name(kind: ObjectKind) -> str:
    """Return the name of a kind's target and of its directory in the corpus."""
    return re.sub(r"[^a-z]+", "_", kind.name)


TARGETS = [
    *(of_kind(kind) for kind in KINDS if kind.codec),
    Target(
        name="rollout",
        load=_of("rollouts.wire", "decode_rollout", encode="encode_rollout"),
        mutate=_pb("internal.v1.rollout_pb2", "Rollout"),
    ),
    Target(name="event", load=_event, mutate=_pb("v1.event_pb2", "Event")),
    Target(name="entry", load=_entry, mutate=_entry_mutate),
    Target(name="origin", load=_of("runlog.records.run_record", "parse_origin", where="x"), mutate=_json),
    Target(name="run_hash", load=_of("runlog.redis.log", "parse_run_hash"), mutate=_json),
    Target(name="header_state", load=_of("orchestrator.drive.batch_writer", "decode_state"), mutate=_json),
    Target(
        name="adapter_config",
        load=_of("inference.vllm.lora", "parse_adapter_config", source="x"),
        mutate=_json,
    ),
    Target(name="safetensors", load=_read_places, mutate=_places_mutate),
    Target(
        name="delta_frame",
        load=_delta,
        mutate=lambda: m.wrapped(m.bytes_of, lambda data: data[8:], _sealed_frame),
    ),
    Target(name="checkpoint_index", load=_index, mutate=_json),
    Target(name="config_document", load=_config, mutate=_json),
    Target(name="config_toml", load=_config_file(".toml")),
    Target(name="config_json", load=_config_file(".json"), mutate=_json),
    Target(name="config_argv", load=_config_argv),
    Target(name="worker_frame", load=_frame, mutate=_frame_mutate),
    Target(name="rpc_status", load=_status, mutate=lambda: m.message_of(_status_type())),
    Target(name="tokens_file", load=_tokens),
    Target(name="routed_experts", load=_routed_experts),
    Target(name="grpc", load=_surface("Grpc"), mutate=_grpc_mutate, answers_all=False, max_s=10.0, weight=4),
    Target(name="http", load=_surface("Http"), mutate=_http_mutate, answers_all=False, max_s=10.0, weight=4),
    Target(name="dashboard", load=_pages, mutate=_pages_mutate, answers_all=False, max_s=10.0, weight=4),
    Target(name="chat_parsers", load=_chat_parsers, errors=()),
    Target(name="agents", load=_agents, mutate=_agents_mutate, errors=()),
    Target(name="data_file", load=_data_file),
    Target(name="data_lines", load=_data_file, mutate=_json),
    Target(name="stack_json", load=_stack, mutate=_json),
]


def _status_type() -> Any:
    from google.rpc import status_pb2

    return status_pb2.Status


BY_NAME = {target.name: target for target in TARGETS}
