"""Models whose positions follow the longest sequence: vLLM's log-probs are the trainer's, on both sides of the length
where the factors change, and a policy of the other side is refused."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.models.context_length import fix_context_length
from millrace.storage import open_store
from millrace.trainer.model.pretrained import probe
from millrace_testing import scaled_positions
from millrace_testing.inference import published, vllm_server
from millrace_testing.scaled_positions import BORDER

LONG = 64
FLAGS = {"enforce_eager": True, "max_num_seqs": 4, "block_size": 32}
SIDES = [("longrope", BORDER), ("longrope", LONG), ("dynamic", BORDER)]
pytestmark = pytest.mark.timeout(300)


def trained(kind: str, length: int) -> Any:
    """Return the model as the trainer of a run with this context has it."""
    model = scaled_positions.model_of(kind).requires_grad_(False)
    fix_context_length(model, length)
    return model


@pytest.fixture(scope="module", params=SIDES, ids=lambda side: "-".join(map(str, side)))
def side(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def server(vllm_python: str, side: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    (kind, length), directory = side, tmp_path_factory.mktemp("positions")
    published.files(model := scaled_positions.model_of(kind), directory / "model")
    model.save_pretrained(directory / "model")
    yield from vllm_server.serving(vllm_python, directory / "model", directory, max_model_len=length, **FLAGS)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield client


def publisher(server: Any, uid: str) -> published.Publisher:
    return published.Publisher(open_store(f"file://{server.directory}/store"), server.directory / "scratch", uid)


def proof(kind: str, length: int) -> Any:
    return probe(trained(kind, length), vocabulary=256, device=torch.device("cpu"))


async def test_log_probs_are_the_trainers(client: Any, server: Any, side: tuple[str, int]) -> None:
    kind, length = side
    client.uid = "same"
    model = scaled_positions.model_of(kind)
    status = await client.serve(publisher(server, "same").full(model, 0, probed=proof(kind, length)))
    assert "probe" in status.proof
    rng, sizes = random.Random(0), [(3, 4), (length // 2, 6), (2, length - 2), (length - 5, 5), (BORDER - 4, 4)]
    prompts = [[rng.randrange(256) for _ in range(size)] for size, _ in sizes]
    asked = [client.generate(prompt, count) for prompt, (_, count) in zip(prompts, sizes, strict=True)]
    answers = zip(prompts, await asyncio.gather(*asked), strict=True)
    gaps = np.concatenate(
        [
            published.logprobs(trained(kind, length), prompt, given.token_ids) - np.asarray(given.logprobs)
            for prompt, given in answers
        ]
    )
    mismatch_kl = float(np.mean(np.expm1(gaps) - gaps))
    print(f"{kind} in a context of {length}: mismatch_kl {mismatch_kl:.1e}, largest gap {np.abs(gaps).max():.1e}")
    assert mismatch_kl <= 1e-9


async def test_a_policy_of_another_context_is_refused(client: Any, server: Any, side: tuple[str, int]) -> None:
    kind, length = side
    client.uid = "other"
    other = LONG if length == BORDER else BORDER
    entry = publisher(server, "other").full(scaled_positions.model_of(kind), 0, probed=proof(kind, other))
    status = await client.update(entry)
    assert status.state == pb.POLICY_STATE_UPDATE_FAILED and f"this engine serves {length}" in status.error
    assert "inference.model.max_model_len" in status.error
