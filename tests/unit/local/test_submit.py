"""`millrace rl` submits its run although the orchestrator of its own stack dies at that moment."""

from types import SimpleNamespace

import pytest

from millrace.cli.session import run_session as session
from millrace.errors import UnavailableError


class Runs:
    """Refuses a few times, then takes the run."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.request_ids: list[str] = []

    async def create(self, config_json: str, *, run_id: str, request_id: str, labels: object) -> str:
        self.request_ids.append(request_id)
        if len(self.request_ids) <= self.refusals:
            raise UnavailableError("nobody listens")
        return f"run {run_id}"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(session, "SUBMIT_PAUSE_S", 0.01)
    monkeypatch.setattr(session, "SUBMIT_DEADLINE_S", 0.2)


async def submit(runs: Runs) -> tuple[object, list[str]]:
    notes: list[str] = []
    prepared = SimpleNamespace(config=SimpleNamespace(resolved_json=lambda: "{}"), labels={})
    view = SimpleNamespace(note=notes.append)
    run = await session.submit_for_sure(SimpleNamespace(runs=runs), prepared, view, run_id="a")  # type: ignore[arg-type]
    return run, notes


async def test_it_submits_again_with_the_same_request_id(impatient):
    runs = Runs(refusals=2)
    run, notes = await submit(runs)
    assert run == "run a" and len(runs.request_ids) == 3 and len(set(runs.request_ids)) == 1
    assert len(notes) == 2 and "submitting again" in notes[0] and "nobody listens" in notes[0]


async def test_it_gives_up_after_its_deadline(impatient):
    with pytest.raises(UnavailableError, match="nobody listens"):
        await submit(Runs(refusals=10_000))
