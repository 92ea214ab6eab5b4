"""Each token sequence of a sample has its own advantages on its page, whatever the batch left out or cut."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from millrace.rollouts.types import PolicySpan, Rollout, Sample, TrainSample
from millrace.storage.local import LocalStore
from millrace_testing.dashboard import RUN, RunWriter, Served, ServedInThread

CUT = 4
"""`seq_len` of the batch."""
MASKS = ([0, 0, 0], [0, 1, 1], [0, 0, 0, 0, 1], [0, 1, 0, 1, 1])
"""Of one play: nothing sampled, whole, sampled after the cut alone, and cut in what was sampled."""
SAMPLE = f"/api/runs/{RUN}/samples/0-0"


def sequence(number: int) -> Sample:
    mask = np.array(MASKS[number], np.uint8)
    spans = (PolicySpan(lineage=0, version=0, start=0, end=len(mask)),) if mask.any() else ()
    return Sample(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=-mask.astype(np.float32),
        policy_spans=spans,
    )


class SeveralSequences(RunWriter):
    """Member 0 has played several sequences, as an environment with several agents or a folded context does."""

    def rollout(self, step: int, member: int, completions: object) -> Rollout:
        found = super().rollout(step, member, ())
        return found if member else replace(found, samples=tuple(map(sequence, range(len(MASKS)))))

    def train_samples(self, step: int, member: int) -> list[TrainSample]:
        (usual,) = super().train_samples(step, member)
        if member:
            return [usual]
        return [
            replace(
                usual,
                token_ids=sample.token_ids[:CUT],
                loss_mask=sample.loss_mask[:CUT],
                inference_logprobs=sample.inference_logprobs[:CUT],
                advantages=sample.loss_mask[:CUT].astype(np.float32) * number,
            )
            for number, sample in enumerate(map(sequence, range(len(MASKS))))
            if sample.loss_mask[:CUT].any()
        ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = LocalStore(tmp_path_factory.mktemp("advantages") / "store")
    SeveralSequences(store=store).step(0)
    with ServedInThread(store, tmp_path_factory.mktemp("index")) as found:
        for _ in range(600):
            if found.ask(SAMPLE)[0] == 200:
                break
            threading.Event().wait(0.1)
        yield found


@pytest.mark.parametrize(
    ("part", "advantages"), [(0, None), (1, [0.0, 1.0, 1.0]), (2, None), (3, [0.0, 3.0, 0.0, 3.0, None])]
)
def test_a_sequence_has_the_advantages_of_its_own(served: Served, part: int, advantages: list | None) -> None:
    """`None` of a token: it is behind the cut, and was not trained on."""
    status, tokens = served.json(f"{SAMPLE}/tokens?part={part}")
    assert status == 200, tokens
    assert tokens["mask"] == MASKS[part]
    assert tokens["advantages"] == advantages


def test_a_page_of_tokens_has_the_advantages_of_its_window(served: Served) -> None:
    _, tokens = served.json(f"{SAMPLE}/tokens?part=3&offset=3&size=2")
    assert tokens["advantages"] == [3.0, None]
