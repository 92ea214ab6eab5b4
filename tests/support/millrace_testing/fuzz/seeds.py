"""Writes the corpus: small valid objects, made by the code that writes them.

python -m millrace_testing.fuzz.seeds
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from millrace.internal.v1 import env_worker_pb2, play_pb2
from millrace.rollouts.types import (
    OwnSampling,
    PolicySpan,
    Purpose,
    Rollout,
    RolloutError,
    RolloutStatus,
    Sample,
    Trace,
    Truncation,
    TurnReward,
)
from millrace_testing.fuzz.data_files import data_files
from millrace_testing.fuzz.pages import requests
from millrace_testing.fuzz.targets import CORPUS, fuzz_name
from millrace_testing.inference import parser_cases

RUN = {
    "uid": "0123456789ab0123456789abcdef",
    "name": "a-run",
    "kind": "RL",
    "config": {},
    "run_hash": "0" * 64,
    "request_id": "r",
    "create_time": "2026-01-01T00:00:00.000000Z",
    "code_version": "0.1.0",
    "labels": {"a": "b"},
}
OWN_SAMPLING = (OwnSampling(start=2, end=3, temperature=0.5, truncation=Truncation(top_p=0.9, top_k=8)),)
MINIMAL = {
    "max_steps": 3,
    "model": {"name": "tiny"},
    "orchestrator": {"env": [{"id": "reverse-text"}], "rollouts_per_example": 4},
}


def sample() -> Sample:
    return Sample(
        token_ids=np.array([1, 2, 3, 4, 5], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        inference_logprobs=np.array([0, 0, -1, -0.5, -2], np.float32),
        policy_spans=(
            PolicySpan(lineage=0, version=1, start=2, end=3),
            PolicySpan(lineage=0, version=2, start=3, end=5),
        ),
        turns=(TurnReward(end=3, reward=0.25), TurnReward(end=5, reward=-1.0)),
        own_sampling=OWN_SAMPLING,
        routed_experts=np.arange(24, dtype=np.uint8).reshape(4, 3, 2),
    )


def rollout(*, is_ok: bool = True, ordinal: int = 0) -> Rollout:
    return Rollout(
        run_uid=RUN["uid"],  # pyright: ignore
        purpose=Purpose.TRAIN,
        ordinal=ordinal,
        member=1,
        attempt=0,
        group_size=4,
        env="reverse-text",
        task_index=3,
        task_id="t-3",
        status=RolloutStatus.OK if is_ok else RolloutStatus.ENV_ERROR,
        error=None if is_ok else RolloutError(type="ValueError", message="boom"),
        samples=(sample(),) if is_ok else (),
        reward=0.5,
        metrics={"a": 1.0},
        stop_condition="stop",
        is_truncated=False,
        num_turns=1,
        seconds=1.0,
        temperature=1.0,
        env_server="env-server-1",
        planned_step=2,
        messages_json='[{"role":"user","content":"x"}]',
        task_json='{"answer":"y"}',
        traces=(Trace(agent="white", reward=0.5, num_samples=1, num_turns=2),) if is_ok else (),
    )


def delta_base() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**16, 300).astype(np.uint16)


def stored() -> Iterator[tuple[str, bytes]]:
    """Yield (target, bytes) for the first and the last object of each kind in the catalogue, from a recorded run."""
    from millrace.local.redis import EmbeddedRedis
    from millrace.runlog.catalogue import REOPENING
    from millrace.runlog.records.revisions import Reopening
    from millrace_testing.runlog.scene import objects, record_scene

    with tempfile.TemporaryDirectory() as directory:
        redis = EmbeddedRedis(Path(directory) / "redis")
        redis.start()
        try:
            scene = record_scene(Path(directory), redis.url)
        finally:
            redis.kill()
        for kind, keys in objects(scene.store, scene.names).items():
            if kind.codec:
                yield from ((fuzz_name(kind), scene.store.get(key)) for key in sorted({keys[0], keys[-1]}))
    reopening = Reopening(step=1, revision=0, closing_sha256="0" * 64, epoch=1, owner="o", time="")
    yield fuzz_name(REOPENING), reopening.encode()


def _safetensors() -> bytes:
    from millrace.policies.tensors import TensorBytes, pack_safetensors

    return pack_safetensors([("w", TensorBytes.from_numpy(np.arange(6, dtype=np.float32)))])[0]


def _deltas() -> Iterator[bytes]:
    from millrace.policies.delta_codec import encode_piece

    base = delta_base()
    for share in (0.02, 0.9):
        new = base.copy()
        at = np.random.default_rng(1).random(base.size) < share
        new[at] ^= 3
        piece = encode_piece(base, new)
        if piece is not None:
            yield bytes(piece.data)


INDEX_SIZES = {"0.bin": 48}


def _index() -> bytes:
    from millrace.trainer.checkpoint.index import ShardPiece, ShardTensor, encode_index

    pieces = (ShardPiece("0.bin", 0, 0, 6), ShardPiece("0.bin", 24, 6, 6))
    return encode_index([ShardTensor(name="w", dtype="float32", shape=(3, 4), pieces=pieces)])


def _status() -> bytes:
    from millrace.errors import InvalidSpecError, Violation
    from millrace.rpc.status import to_status

    error = InvalidSpecError([Violation(field="a", value="1", message="b", source="c")], remedy="d")
    return to_status(error, request_id="r").SerializeToString()


def corpus() -> Iterator[tuple[str, bytes]]:
    """Yield (target, bytes) for the whole corpus."""
    from google.protobuf.timestamp_pb2 import Timestamp

    from millrace.rollouts.routed_experts import to_answer
    from millrace.rollouts.token_log import encode_scores
    from millrace.rollouts.types import Taught
    from millrace.rollouts.wire import encode_archive, encode_rollout, rollout_to_proto
    from millrace.runlog.redis.entry import FORMAT_MAJOR
    from millrace.v1 import event_pb2, run_pb2

    good, failed = rollout(), rollout(is_ok=False, ordinal=1)
    yield from (("rollout", encode_rollout(one)) for one in (good, failed))
    yield from stored()
    yield "rollout_archive", encode_archive([good, failed])
    assert good.samples[0].routed_experts is not None
    yield "routed_experts", to_answer(good.samples[0].routed_experts).encode()
    columns = [np.array([0, 0, -1, -1, -1], np.float32)]
    yield "scores", encode_scores(good.samples, columns, [Taught(lineage=0, version=1, hint_ids=(1, 2))])
    changed = event_pb2.StateChanged(new_state=run_pb2.RUN_STATE_RUNNING)
    event = event_pb2.Event(writer="w", writer_sequence=3, time=Timestamp(seconds=5), state_changed=changed)
    data = event.SerializeToString()
    yield "event", data
    yield "entry", b"|".join([b"1-7", str(FORMAT_MAJOR).encode(), hashlib.sha256(data).hexdigest().encode(), data, b""])
    run = json.dumps(RUN).encode()
    fork = {"uid": "u", "step": 3, "base_step": 2, "chain_hash": "0" * 64, "name": "p"}
    yield from (("origin", one) for one in (run, json.dumps({**RUN, "parent": fork}).encode()))
    yield "run_hash", run
    yield "header_state", json.dumps({"num_duplicates": 1, "read_until": "1-2", "scored_whole": []}).encode()
    pools = {"placed": [{"env": "a", "pool": "easy", "tasks": [3]}, {"env": "a", "pool": "hard", "bitmap": "Bg=="}]}
    pools |= {"recent": [{"drawn_below": 9, "step": 2, **pools}], "step": 1, "drawn_below": 9, "digests": {"a": "d"}}
    yield "header_state", json.dumps({"num_duplicates": 0, "read_until": "", "pools": pools}).encode()
    yield (
        "adapter_config",
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}).encode(),
    )
    yield "safetensors", _safetensors()
    yield from (("delta_frame", frame) for frame in _deltas())
    yield "checkpoint_index", _index()
    for tree in (MINIMAL, {**MINIMAL, "trainer": {"optim": {"lr": 1e-4}}, "ckpt": {"interval": 2}}):
        yield "config_document", json.dumps(tree).encode()
        yield "config_json", json.dumps(tree).encode()
    toml = ["max_steps = 3", "[model]", 'name = "tiny"', "[orchestrator]", "rollouts_per_example = 4"]
    toml += ["[[orchestrator.env]]", 'id = "reverse-text"', "args = {a = 1}", ""]
    yield "config_toml", "\n".join(toml).encode()
    argv = ["--max-steps", "3", "--model.name", "tiny", "--orchestrator.rollouts-per-example", "4"]
    argv += ["--orchestrator.env", '[{"id": "a"}]', "", "seed=4", "trainer__optim__lr=1e-4"]
    yield "config_argv", "\n".join(argv).encode()
    loaded = env_worker_pb2.WorkerReport(
        ended=env_worker_pb2.PlayEnded(play_id=1, rollouts=[rollout_to_proto(good)])
    ).SerializeToString()
    yield "worker_frame", len(loaded).to_bytes(4, "little") + loaded
    yield "rpc_status", _status()
    yield "tokens_file", b"# people\nsha256:" + b"0" * 64 + b" alice expires=2030-01-31T12:00:00Z\n"
    yield from surface()
    yield from (("dashboard", data) for data in requests())
    yield from (("chat_parsers", case.text.encode()) for case in parser_cases.XML[:4] + parser_cases.HERMES[2:4])
    yield from (("chat_parsers", case.text.encode()) for case in parser_cases.LLAMA[2:4] + parser_cases.THOUGHTS[5:6])
    yield from (("agents", data) for data in agents())
    yield "stack_json", json.dumps({"pid": 1, "address": "127.0.0.1:1", "processes": []}).encode()
    yield from data_files()


def agents() -> Iterator[bytes]:
    """Yield requests of agents in each API: path, line end, body."""
    user, schema = {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"type": "object", "properties": {}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    chat = [{"role": "developer", "content": "b"}, user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "c", "content": "d"})
    items = [user | {"content": [{"type": "input_text", "text": "a"}]}, {"type": "reasoning", "summary": []}]
    items += [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "c", "output": "d"}]
    blocks = [{"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "d"}]}
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": chat, "tools": [{"type": "function", "function": function}], "n": 2}),
        ("chat/completions", {"messages": [user], "max_tokens": 2, "stop": ["x"], "temperature": 1, **streams}),
        ("responses", {"input": items, "instructions": "b", "tools": [{"type": "function", **function}]}),
        ("responses", {"input": "a", "max_output_tokens": 2, "tool_choice": "none", **streams}),
        ("messages", {"messages": [user, {"role": "assistant", "content": blocks}, result], "system": "b"}),
        ("messages", {"messages": [user], "max_tokens": 2, "stream": True, "tools": [{"name": "f"}]}),
    ]
    for path, body in bodies:
        yield f"/v1/{path}\n".encode() + json.dumps(body).encode()


def surface() -> Iterator[tuple[str, bytes]]:
    """Yield (target, bytes) for calls of the gRPC and HTTP APIs: the name of the call, a line end, the message or
    body.
    """
    from millrace_testing.fuzz.surface import HTTP_BODIES, methods

    for path, method in methods().items():
        yield "grpc", path.encode() + b"\n" + _request(method).SerializeToString()
    for path, bodies in HTTP_BODIES.items():
        for body in bodies:
            yield "http", path.encode() + b"\n" + json.dumps(body).encode()


def _request(message_type: type) -> Any:
    from millrace.internal.v1 import env_service_pb2, policy_service_pb2, worker_service_pb2
    from millrace.v1 import run_service_pb2

    request: Any = message_type()
    for name in ("name", "parent"):
        if name in request.DESCRIPTOR.fields_by_name:
            setattr(request, name, "runs/fuzz")
    match request:
        case run_service_pb2.CreateRunRequest():
            request.kind, request.config_json, request.validate_only = 1, json.dumps(MINIMAL), True
            request.labels["a"] = "b"
        case run_service_pb2.ListRolloutsRequest():
            request.page_size, request.order_by = 3, "reward desc"
            request.filter.update({"env": "a,b", "min_reward": "0.5", "outcome": "trained"})
        case run_service_pb2.ListMetricsRequest():
            request.page_size = 3
            request.names.append("reward/mean")
        case run_service_pb2.GetLineageRequest():
            request.version = 0
        case worker_service_pb2.RegisterWorkerRequest():
            worker = worker_service_pb2.Worker(worker_id="w", kind=1, address="127.0.0.1:1", capacity=1, slot="s")
            request.worker.CopyFrom(worker)
        case worker_service_pb2.HeartbeatRequest():
            request.worker_id = "w"
            request.waits.add(reason="a", age_seconds=1.0)
            request.policy.version = 1
        case play_pb2.PlayGroupRequest():
            request.sampling.CopyFrom(play_pb2.Sampling(temperature=1.0, max_tokens=4, extra_body_json="{}"))
            request.env.CopyFrom(play_pb2.EnvSpec(name="e", id="e", args_json="{}"))
            request.run_uid, request.purpose, request.group_size = "u", 1, 1
            request.members.append(0)
            request.base_url, request.rollout_timeout_seconds = "http://127.0.0.1:1/v1", 5.0
        case env_service_pb2.OpenEnvRequest():
            request.env.CopyFrom(play_pb2.EnvSpec(name="e", id="e", args_json="{}"))
        case env_service_pb2.ListPlayingRequest() | env_service_pb2.CancelGroupsRequest():
            request.run_uid = "u"
        case policy_service_pb2.UpdatePolicyRequest():
            request.run_uid, request.policy.manifest_key = "u", "p/runs/u/policies/x/manifest.json"
            request.policy.manifest_sha256, request.wait_seconds = bytes(32), 0.0
    return request


def main() -> None:
    """Write every input into its target's directory, numbered."""
    numbers: dict[str, int] = {}
    for name, data in corpus():
        path = CORPUS / name / f"{numbers.setdefault(name, 0)}.bin"
        numbers[name] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    print(f"{sum(numbers.values())} inputs of {len(numbers)} targets")


if __name__ == "__main__":
    main()
