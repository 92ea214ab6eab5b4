"""A look at the store in the background: one at a time, whoever asks."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.readers.dashboard.query import StoreRefresh


@pytest.fixture
def rude_threads() -> Iterator[None]:
    """Yield threads that are changed as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def most_at_once() -> int:
    """Return how many looks were under way at the same time, of those that eight pages asked for."""
    going, most, together = 0, 0, threading.Barrier(8)
    counting, answered = threading.Lock(), threading.Event()

    def look() -> None:
        nonlocal going, most
        with counting:
            going += 1
            most = max(most, going)
        answered.wait(10.0)
        with counting:
            going -= 1

    looking = StoreRefresh(look, fresh_s=60.0)

    def ask() -> None:
        together.wait(10.0)
        looking.refresh()

    with ThreadPoolExecutor(8) as pages:
        for page in [pages.submit(ask) for _ in range(8)]:
            page.result()
    answered.set()
    looking.close()
    return most


@pytest.mark.usefixtures("rude_threads")
def test_pages_that_ask_at_once_share_one_look():
    assert {most_at_once() for _ in range(100)} == {1}
