"""The public Tinker SDK against our server, as it is and through kills."""

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.internal.v1 import tinker_pb2
from millrace_testing.polling import block_until
from millrace_testing.tinker import ANSWER_S, Server

pytestmark = pytest.mark.timeout(1500)

LOOP = Path(__file__).with_name("sdk_loop.py")
LIMIT_S = 1200
# What each field of the SDK's messages is: number, type, whether it is repeated.
FIELDS = """
import json
from tinker.proto import tinker_public_pb2 as pb
def fields(message):
    return {field.number: [field.type, field.is_repeated] for field in message.fields}
print(json.dumps({name: fields(each) for name, each in pb.DESCRIPTOR.message_types_by_name.items()}))
"""
BYTES, MESSAGE = 12, 11


def loop(python: Path, server: Server) -> dict[str, Any]:
    environ = {"PATH": "/usr/bin:/bin", "TINKER_API_KEY": "tml-none", "HOME": str(server.store.parent)}
    done = subprocess.run(
        [str(python), str(LOOP), server.url], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def unbroken(tinker_python: Path, server: Server) -> dict[str, Any]:
    return loop(tinker_python, server)


def test_messages_have_the_sdks_field_numbers(tinker_python: Path) -> None:
    found = subprocess.run([str(tinker_python), "-c", FIELDS], capture_output=True, text=True, timeout=120, check=True)
    theirs = json.loads(found.stdout)
    ours = tinker_pb2.DESCRIPTOR.message_types_by_name
    shared = sorted(theirs.keys() & ours.keys())
    assert {"ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse", "Datum", "Tensor"} <= set(shared)
    for name in shared:
        for field in ours[name].fields:
            kind, is_repeated = theirs[name][str(field.number)]
            # Messages that are only refused are bytes here: both have a length before them.
            same = {BYTES, MESSAGE} if field.type == BYTES else {field.type}
            assert kind in same and is_repeated == field.is_repeated, (name, field.name)


def test_a_loop_learns_samples_saves_and_resumes(unbroken: dict[str, Any]) -> None:
    assert unbroken["losses"] == sorted(unbroken["losses"], reverse=True)
    assert "loss_fn: must be one of" in unbroken["refused"]
    assert unbroken["ends"][0] == unbroken["ends"][1], "a model of the saved state is the model that was saved"
    # The sampler of the state scores the tokens as the trainer does, up to the order of sums.
    assert unbroken["scored"][1:] == pytest.approx(unbroken["ends"][0][0], abs=1e-4)
    assert unbroken["path"] in unbroken["listed"]


def test_a_loop_through_kills_is_equal_bit_for_bit(
    tinker_python: Path, unbroken: dict[str, Any], tmp_path: Path, base: Path
) -> None:
    server = Server(tmp_path, base)
    server.start()
    over = threading.Event()
    kills: list[str] = []

    def kill() -> None:
        for results, role in ((2, "trainer"), (5, "server"), (9, "trainer"), (13, "sampler"), (14, "server")):
            block_until(
                lambda least=results: over.is_set() or server.results() >= least, timeout_s=ANSWER_S, poll_s=0.01
            )
            if over.is_set():
                return
            if role == "server":
                server.kill()
                server.start()
            else:
                server.kill_worker(role)
            kills.append(role)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = loop(tinker_python, server)
    finally:
        over.set()
        killer.join()
        server.stop()
    assert kills == ["trainer", "server", "trainer", "sampler", "server"]
    for name in ("losses", "samples", "sampled_logprobs", "ends", "scored"):
        assert found[name] == unbroken[name], name
