"""A replica on real vLLM without `enforce_eager`: its compiled graphs must not go on with weights of an old version."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.storage.local import LocalStore
from millrace_testing.inference import published, vllm_server

PROMPT = [1, 2, 3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("compiled")
    model = published.model(99)
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")
    flags = {"enforce_eager": False, "max_model_len": 256, "max_num_seqs": 4}
    yield from vllm_server.serving(vllm_python, directory / "model", directory, **flags)


async def test_compiled_graphs_compute_with_the_new_weights(server: Any) -> None:
    publisher = published.Publisher(LocalStore(server.directory / "store"), server.directory, "compiled")
    models = [published.model(0)]
    models += [published.nudged(models[0], 1)]
    models += [published.nudged(models[1], 2)]
    models += [published.model(3)]
    async with server.client() as client:
        client.uid = publisher.uid
        for version, model in enumerate(models):
            is_delta = version in (1, 2)
            entry = publisher.delta(model, version, base=version - 1) if is_delta else publisher.full(model, version)
            await client.serve(entry, pb.INFLIGHT_MODE_RECOMPUTE)
            found = await client.generate(PROMPT, 32)
            gaps = [np.abs(published.logprobs(m, PROMPT, found.token_ids) - found.logprobs).max() for m in models]
            assert gaps.pop(version) <= 1e-5
            assert min(gaps) > 1e-3, "versions that compute the same prove nothing"
    assert "Warming up model for the compilation" in (server.directory / "replica.log").read_text()
