"""Bytes of others are decoded in `millrace/decoding.py` and nowhere else, and nobody catches protobuf's errors.

A decoder of a library raises what its caller does not expect (protobuf's `DecodeError` is no `ValueError`, deep JSON is
a `RecursionError`), and takes whatever memory the bytes ask for. Read from the source; what is exempt is in a list
with its reason, and an entry that matches nothing fails as well.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from millrace_testing import syntax

ROOT = Path(__file__).parents[2] / "services" / "millrace"
SKIPPED = ("v1", "internal")  # generated
HOME = "decoding.py"

PARSERS = {"FromString", "ParseFromString", "MergeFromString", "Unpack", "ParseDict", "Parse"}
JSON = {"json.loads", "json.load", "orjson.loads", "tomllib.load", "tomllib.loads", "pickle.loads", "pickle.load"}
ZSTD = {"decompress", "decompressobj", "stream_reader"}
NAMES = PARSERS | ZSTD

OWN = "bytes that this process has just made"
ANSWER = "an answer of a server that this process called; what it raises is caught beside it"
USERS = "a file or a setting of the user who started this process"
PEER = "written by another process of the same service, over a pipe or file of its own"

RUN = "a run's config as the server sent it, which has checked it"
CHECKED = "the env-server has checked it (`check_play`) before it reached the worker"

ALLOWED = {
    "cli/commands/env_check.py:_describe_rollout": "the conversation of a rollout that this command has just decoded",
    "cli/commands/env_check.py:_object": USERS,
    "cli/commands/env_check.py:_pair": USERS,
    "cli/commands/run/fork.py:_config": OWN,
    "cli/commands/run/fork.py:_fork": RUN,
    "cli/session/prepare.py:print_config": OWN,
    "cli/evals/prepare.py:_from_toml": USERS + "; every error of the parser is caught",
    "cli/evals/session.py:_settings": OWN,
    "cli/offline/ended.py:_record": RUN,
    "cli/offline/ended.py:_require_kept": RUN,
    "cli/view/progress.py:of": RUN,
    "local/gpus.py:_estimate": "what this program's own command has printed",
    "local/gpus.py:flags_on_shared_gpu": USERS + "; what is no JSON is left to the process that reads it",
    "env_server/agents/v1.py:_ask": "what the interception of the same process has just written",
    "env_server/adapters/runtimes_v1.py:launch": "what the interception of the same process has just written",
    "cli/session/run_session.py:_differences": OWN,
    "cli/session/run_session.py:begin": RUN,
    "cli/session/config_file.py:read_raw": USERS,
    "config/files.py:_parse_toml": USERS + ", read with a bound; every error of the parser is caught",
    "env_server/adapters/client_v0.py:_parsed": ANSWER,
    "env_server/adapters/renderer.py:choose_renderer": "a tokenizer config, in a worker, which ends with what it loads",
    "env_server/adapters/renderer.py:generate_with_spans": ANSWER,
    "env_server/adapters/asked_together.py:_take": ANSWER,
    "env_server/teacher/client.py:answer_object": ANSWER,
    "rollouts/requests.py:request_parameters": CHECKED,
    "inference/settings.py:_json_table": USERS,
    "inference/vllm/engine.py:_config": "the config of a model that vLLM itself has loaded",
    "inference/vllm/workers/node_copy.py:_read": PEER,
    "inference/vllm/gate.py:rewritten": PEER,
    "readers/audit/process.py:audit_beside": PEER,
    "orchestrator/new_run.py:_relevant": OWN,
    "orchestrator/new_run.py:make_record": OWN,
    "runlog/event_writer.py:_append_again": OWN,
    "telemetry/faults.py:_strike": USERS,
    "trainer/sft/rows.py:_decoded": USERS,
}


@functools.cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    named = ((path.relative_to(ROOT).as_posix(), path) for path in sorted(ROOT.rglob("*.py")))
    return tuple(
        (name, syntax.parse(path.read_text()))
        for name, path in named
        if name.split("/")[0] not in SKIPPED and name != HOME
    )


def _found(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """Yield decoders below a node with the outermost function or method around each."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if function == "<module>" and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = child.name
        if isinstance(child, ast.Attribute) and (child.attr in NAMES or child.attr in ("load", "loads")):
            text = ast.unparse(child)
            if child.attr in NAMES or text in JSON:
                yield inner, text
        yield from _found(child, inner)


@functools.cache
def decoders() -> tuple[tuple[str, str], ...]:
    """Return where a decoder of a library is called or named: `file:function`, and what."""
    return tuple(
        (f"{name}:{function}", what) for name, tree in sources() for function, what in _found(tree, "<module>")
    )


def test_bytes_of_others_are_decoded_in_one_place():
    exempt = ALLOWED
    wrong = sorted({f"{where} uses {what}" for where, what in decoders() if where not in exempt})
    assert not wrong, "use millrace.decoding, or say in ALLOWED why it is not the bytes of others:\n" + "\n".join(wrong)


def test_every_exemption_matches_something():
    found = {where for where, _ in decoders()}
    stale = sorted(ALLOWED.keys() - found)
    assert not stale, f"these decode nothing any more: take them out: {stale}"


def test_nobody_names_protobufs_decode_error():
    """It is caught where it is raised, in `decoding.py`: a module that names it elsewhere decodes on its own."""
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        for node in syntax.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "DecodeError" for alias in node.names)
    ]
    assert not wrong


def test_nobody_takes_value_error_for_the_base_of_protobufs_error():
    """With the pinned protobuf it is not; a `try` around a parser that catches ValueError catches nothing of it."""
    wrong = []
    for name, tree in sources():
        for node in syntax.walk(tree):
            if not isinstance(node, ast.Try):
                continue
            parses = any(
                isinstance(c, ast.Attribute) and c.attr in PARSERS for part in node.body for c in ast.walk(part)
            )
            caught = {ast.unparse(handler.type) for handler in node.handlers if handler.type is not None}
            if parses and any("ValueError" in text for text in caught):
                wrong.append(f"{name}:{node.lineno}")
    assert not wrong
