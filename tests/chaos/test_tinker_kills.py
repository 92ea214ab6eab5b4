"""`millrace tinker` under SIGKILL of each of its processes: every request counts once, and the weights are equal."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace_testing.model_files import make_qwen3, write_tokenizer
from millrace_testing.polling import block_until
from millrace_testing.tinker import ANSWER_S, Client, Server, datum

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

STEPS = 12
TRAINER, SAMPLER = "trainer", "sampler"
SAMPLING = {"max_tokens": 5, "temperature": 1.0, "seed": 9}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(make_qwen3(tmp_path_factory.mktemp("base"), is_tied=True), num_tokens=48)


def sampled(client: Client, sampler: str, seq_id: int) -> bytes:
    return client.sample(sampler, seq_id, [1, 2, 3], sampling_params=SAMPLING).SerializeToString()


def train(client: Client, *, between: Callable[[int], None]) -> tuple[list[bytes], bytes]:
    """Return the results of a loop of two losses and a step, all sent at once, and its weights at the end.

    `between` is called with the number of the step before its results are asked for.
    """
    model = client.model(0)
    numbers = itertools.count(1)
    futures: list[list[str]] = []
    for step in range(STEPS):
        rows = [datum([1 + step, 2, 3 + step, 4]), datum([5, 6 + step, 7])]
        futures.append([client.forward_backward(model, next(numbers), [row]) for row in rows])
        rate = {"learning_rate": 0.01 / (step + 1)}
        futures[-1].append(client.send("optim_step", model, next(numbers), adam_params=rate))
    results = []
    for step, sent in enumerate(futures):
        between(step)
        for each in sent:
            found = client.result(each)
            results.append(found if isinstance(found, bytes) else str(found).encode())
    sampler = client.sampler(model, next(numbers), 0)
    results += [sampled(client, sampler, seq_id) for seq_id in range(3)]
    client.result(client.send("save_weights", model, next(numbers), path="end"))
    status, _, data = client.ask(f"training_runs/{model}/checkpoints/weights/end/archive")
    assert status == 200
    return results, data


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[tuple[list[bytes], bytes]]:
    server = Server(tmp_path_factory.mktemp("unbroken"), base)
    server.start()
    try:
        yield train(Client(server), between=lambda step: None)
    finally:
        server.stop()


def test_weights_after_kills_are_those_of_an_unbroken_loop(
    tmp_path: Path, base: Path, unbroken: tuple[list[bytes], bytes]
) -> None:
    server = Server(tmp_path, base)
    server.start()
    client = Client(server)

    def between(step: int) -> None:
        # The trainer has all requests by now, and executes them: it dies somewhere in between.
        if step in (0, 3, 7):
            block_until(lambda: server.results() > 3 * step, timeout_s=ANSWER_S, poll_s=0.002)
            server.kill_worker(TRAINER)
        elif step in (4, 9):
            server.kill()
            server.start()

    try:
        results, weights = train(client, between=between)
        assert weights == unbroken[1]
        assert results == unbroken[0]
        model = f"{client.session}:train:0"
        sampler = f"{client.session}:sample:0"
        server.kill_worker(SAMPLER)
        # Request 3 is equal to the first, under a seq_id of its own: it is sampled by another process.
        assert [sampled(client, sampler, seq_id) for seq_id in (0, 3)] == [results[3 * STEPS]] * 2
        server.kill()
        server.start()
        after = [client.result(f"model/{model}/{seq_id}") for seq_id in range(1, 3 * STEPS + 1)]
        assert [each if isinstance(each, bytes) else str(each).encode() for each in after] == results[: 3 * STEPS]
    finally:
        server.stop()
