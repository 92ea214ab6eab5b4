"""The stack that the chaos tests break; see `millrace_testing.chaos.stack`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.chaos.stack import ChaosStack
from millrace_testing.workplaces import Workplace

TIMEOUT_S = 900


@pytest.fixture(scope="session")
def warm(make_warm: Callable[[int], Workplace]) -> Workplace:
    """Return the warmed-up model in a workplace of the chaos tests' own: other tests count what runs in theirs."""
    return make_warm(0)


_OF_SESSION = pytest.StashKey[ChaosStack]()


@pytest.fixture(scope="session")
def chaos_session(warm, pytestconfig: pytest.Config) -> Iterator[ChaosStack]:
    """Yield one stack for all chaos tests; tests use `chaos`."""
    with ChaosStack(warm, "chaos") as stack:
        pytestconfig.stash[_OF_SESSION] = stack
        yield stack


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a row of chaos tests all ends, not with the session: others want the machine, and no stranger's waits."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        chaos_loop.end_all()
        if (stack := item.config.stash.get(_OF_SESSION, None)) is not None:
            stack.stop()


@pytest.fixture
def chaos(chaos_session: ChaosStack) -> Iterator[ChaosStack]:
    """Yield the session's stack with every process serving and no fault armed."""
    if not chaos_session.is_up:  # tests of another folder came between: see `pytest_runtest_teardown`
        chaos_session.start()
    chaos_session.disarm()
    chaos_session.wait_ready()
    yield chaos_session
    chaos_session.disarm()
    chaos_session.cancel_left()


@pytest.fixture
def make_chaos(warm, request: pytest.FixtureRequest) -> Iterator:
    """Yield makes stacks of a test's own: `make_chaos("--no-liveness", env={...})`. They are stopped after the test."""
    made: list[ChaosStack] = []

    def make(*options: str, **more) -> ChaosStack:
        name = f"{request.node.name.replace('[', '-').rstrip(']')}-{len(made)}"
        stack = ChaosStack(warm, name, options=options, **more)
        made.append(stack)
        stack.start()
        return stack

    yield make
    for stack in made:
        stack.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process that comes back takes seconds, on a busy machine many: these tests get longer than the others."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
