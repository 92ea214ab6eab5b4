"""A server of `millrace tinker` as a process, and a client of its HTTP API without the SDK."""

import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from millrace.internal.v1 import tinker_pb2 as pb
from millrace_testing.polling import block_until

START_S = 240.0
ANSWER_S = 240.0
PROTOBUF = "application/x-protobuf"


class Server:
    """A server on one store; it may be killed and started again, at the same port."""

    def __init__(self, directory: Path, model: Path, *, names: Sequence[str] = ("tiny",)) -> None:
        self.store, self.model, self.names, self.port = directory / "store", model, names, 0
        self._log = directory / "server.log"
        self._environ = {
            **os.environ,
            "MILLRACE_STORE_URL": f"file://{self.store}",
            "OMP_NUM_THREADS": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "millrace.cli", "tinker", "--model", str(self.model)]
        argv += [word for name in self.names for word in ("--name", name)]
        with self._log.open("ab") as log:
            begins = log.tell()
            self.process = subprocess.Popen(
                [*argv, "--listen", f"127.0.0.1:{self.port}"], env=self._environ, stdout=log, stderr=log
            )

        def said() -> re.Match[bytes] | None:
            assert self.process is not None and self.process.poll() is None, self._log.read_text()
            return re.search(rb"Serving at http://127.0.0.1:(\d+)", self._log.read_bytes()[begins:])

        self.port = int(block_until(said, timeout_s=START_S, what="the server listens")[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def worker(self, role: str) -> psutil.Process:
        """Return the newest trainer or sampler."""
        found = re.findall(rf"role={role} worker_pid=(\d+)", self._log.read_text())
        return psutil.Process(int(found[-1]))

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until all that it has started has ended as well."""
        assert self.process is not None
        started = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.wait()
        assert psutil.wait_procs(started, timeout=START_S)[1] == [], "a worker outlives its server"

    def kill_worker(self, role: str) -> None:
        """Kill the trainer or the sampler with SIGKILL, once it lives."""

        def killed() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # the next one is being started
                self.worker(role).kill()
                return True
            return False

        block_until(killed, timeout_s=START_S)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(START_S)

    def results(self) -> int:
        """Return the number of results of models that are stored."""
        return len(list(self.store.glob("*/tinker/*/*/train-*/results/*.pb")))


class Reachable(Protocol):
    """What listens at a port of this machine, which may change."""

    port: int


class Client:
    """Asks a server as the SDK does; a call is repeated while no server listens."""

    def __init__(self, server: Reachable, *, key: str | None = None) -> None:
        self.server, self._key = server, key
        self.session = ""

    def ask(
        self, path: str, body: dict[str, Any] | bytes | None = None, *, method: str | None = None
    ) -> tuple[int, str, bytes]:
        """Return status, content type and body of an answer."""
        ends = time.monotonic() + ANSWER_S
        while True:
            try:
                return self._ask(path, body, method or ("GET" if body is None else "POST"))
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < ends, "no server answers"
                time.sleep(0.05)

    def _ask(self, path: str, body: dict[str, Any] | bytes | None, method: str) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        headers = {"content-type": PROTOBUF if isinstance(body, bytes) else "application/json"}
        if self._key is not None:
            headers["X-API-Key"] = f"tml-{self._key}"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, f"/api/v1/{path}", data, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("content-type") or "", answer.read()
        finally:
            connection.close()

    def json(self, path: str, body: dict[str, Any] | bytes | None = None) -> dict[str, Any]:
        status, _, data = self.ask(path, body)
        assert status == 200, (status, data)
        return json.loads(data)

    def refused(self, path: str, body: dict[str, Any] | bytes | None = None) -> tuple[int, str]:
        """Return status and message of an answer that is an error."""
        status, _, data = self.ask(path, body)
        assert status != 200, data
        return status, json.loads(data)["error"]

    def result(self, request_id: str) -> dict[str, Any] | bytes:
        """Return the result of a future: an object, or the bytes of a message."""
        ends = time.monotonic() + ANSWER_S
        while time.monotonic() < ends:
            status, kind, data = self.ask("retrieve_future", {"request_id": request_id})
            assert status == 200, (status, data)
            if kind == PROTOBUF:
                return data
            if (found := json.loads(data)).get("type") != "try_again":
                return found
        raise AssertionError(f"no result of {request_id}")

    def model(self, number: int = 0, **changes: Any) -> str:
        """Make a session if there is none, and a model in it; return the model's id."""
        if not self.session:
            self.session = self.json("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 7},
            **changes,
        }
        made = self.result(self.json("create_model", body)["request_id"])
        assert isinstance(made, dict) and "error" not in made, made
        return made["model_id"]

    def send(self, kind: str, model: str, seq_id: int, **body: Any) -> str:
        """Send a request of a model in JSON, and return the id of its future."""
        return self.json(kind, {"model_id": model, "seq_id": seq_id, **body})["request_id"]

    def forward_backward(self, model: str, seq_id: int, data: Sequence[pb.Datum], **request: Any) -> str:
        """Send a request to compute a loss, and return the id of its future."""
        return self.json("forward_backward", loss_request(model, seq_id, data, **request))["request_id"]

    def sampler(self, model: str, seq_id: int, number: int) -> str:
        """Save a model's weights for a sampling session, and return the session's id."""
        sent = self.send("save_weights_for_sampler", model, seq_id, sampling_session_seq_id=number)
        found = self.result(sent)
        assert isinstance(found, dict)
        return found["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int, prompt: Sequence[int], **more: Any) -> pb.SampleResponse:
        """Sample, and return the answer."""
        sent = self.json("asample", sample_request(sampler, seq_id, prompt, **more))
        found = self.result(sent["request_id"])
        assert isinstance(found, bytes), found
        return pb.SampleResponse.FromString(found)


def loss_request(
    model: str, seq_id: int, data: Sequence[pb.Datum], *, loss: str = "cross_entropy", **request: Any
) -> bytes:
    """Return the body of a forward_backward."""
    return pb.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, data=data, loss_fn=loss, **request
    ).SerializeToString()


def sample_request(sampler: str, seq_id: int, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return the body of an asample; `more` replaces its fields."""
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1},
        **more,
    }


def vector(values: Sequence[float], dtype: int = pb.DTYPE_FLOAT32) -> pb.Tensor:
    kind = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}[dtype]
    return pb.Tensor(dense=np.array(values, kind).tobytes(), dtype=dtype, shape=[len(values)])  # type: ignore[arg-type]


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> pb.Datum:
    """Return an example that predicts each next token; `weights` are 1 unless they, or other inputs, are given."""
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens[:-1], "<i4").tobytes()))
    made = {"target_tokens": vector(tokens[1:], pb.DTYPE_INT64)}
    made |= {name: vector(values) for name, values in (inputs or {"weights": [1.0] * (len(tokens) - 1)}).items()}
    return pb.Datum(model_input=[chunk], loss_fn_inputs=made)


def logprobs_of(output: bytes) -> list[np.ndarray]:
    """Return the log-probs of each datum in a ForwardBackwardOutput."""
    [record] = pb.ForwardBackwardOutput.FromString(output).loss_fn_outputs
    field = record.fields["logprobs"]
    offsets = np.frombuffer(field.offsets, "<i8") // 4
    values = np.frombuffer(field.data, "<f4")
    return [values[a:b] for a, b in itertools.pairwise(offsets)]
