"""How long a store's operation is tried again: a large object takes longer than a store may be away."""

from types import SimpleNamespace

import pytest

from millrace.errors import UnavailableError
from millrace.storage import clean_up
from millrace.storage.clean_up import RetryPolicy, TransientError


class Upload:
    """Every attempt takes two minutes, and as many as were asked for fail behind them."""

    def __init__(self, patch: pytest.MonkeyPatch, *, failures: int) -> None:
        self.now, self.left, self.numbers = 0.0, failures, list[int]()
        patch.setattr(clean_up, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.pass_time))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self, number: int) -> str:
        self.numbers.append(number)
        self.pass_time(120)
        if self.left:
            self.left -= 1
            raise TransientError("HTTP 503 SlowDown")
        return "stored"


def test_a_long_attempt_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part of a checkpoint's upload is throttled after its first minute: that ends no training."""
    upload = Upload(monkeypatch, failures=1)
    assert RetryPolicy().run("PUT k", "here", upload) == "stored"
    assert upload.numbers == [0, 1]


def test_a_store_that_goes_on_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Upload(monkeypatch, failures=9)
    with pytest.raises(UnavailableError, match="failed 2 times"):
        RetryPolicy().run("PUT k", "here", upload)
