"""Two steps under way at once, as vLLM schedules on GPUs: spans still say which version sampled which token."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace_testing.inference import async_on_cpus, published, vllm_server
from millrace_testing.inference.vllm_versions import FLAGS, GAP, SEQS, Run, in_flight

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("async")
    model = published.model(99)
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")
    environ = async_on_cpus.install(directory / "plugin")
    flags = {**FLAGS, "async_scheduling": True}
    yield from vllm_server.serving(vllm_python, directory / "model", directory, environ=environ, **flags)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield client


@pytest.mark.parametrize("mode", [pb.INFLIGHT_MODE_KEEP, pb.INFLIGHT_MODE_RECOMPUTE])
async def test_each_token_is_of_the_version_that_its_span_names(
    client: Any, server: Any, mode: "pb.InflightMode"
) -> None:
    run = Run(server.directory, f"mode{mode}")
    client.uid = run.publisher.uid
    await client.serve(run.full(0, seed=0))
    prompts = [[10 + index, 20, 30] for index in range(2 * SEQS)]
    async with in_flight(client, prompts, lambda prompt: client.generate(prompt, 200)) as tasks:
        await client.serve(run.delta(1, base=0), mode)
    assert async_on_cpus.overlaps(server.directory / "plugin").exists(), "one step was not begun before the last ended"
    cuts = []
    for prompt, task in zip(prompts, tasks, strict=True):
        one = await task
        cut = one.version_of().index(1)
        assert one.version_of() == cut * [0] + (200 - cut) * [1]
        old, new = (published.logprobs(run.models[version], prompt, one.token_ids) for version in (0, 1))
        if cut and mode == pb.INFLIGHT_MODE_KEEP:
            new[cut:] = published.kept_logprobs(run.models[0], run.models[1], prompt, one.token_ids, cut)
        np.testing.assert_allclose(one.logprobs, [*old[:cut], *new[cut:]], atol=GAP)
        assert np.abs(old[cut:] - new[cut:]).max() > 100 * GAP, "versions that compute the same prove nothing"
        cuts.append(cut)
    assert sum(cut > 0 for cut in cuts) == SEQS, "those that ran have tokens of both versions"
