"""The collector rests while libraries are imported, and only then."""

import gc

import pytest

from millrace.telemetry.startup import without_gc


def test_blocks_nest_and_an_error_does_not_leave_the_collector_off() -> None:
    gc.unfreeze()
    with without_gc():
        with pytest.raises(ImportError), without_gc():
            raise ImportError("no such library")
        assert not gc.isenabled()
        survivor = [object()]
    assert gc.isenabled() and gc.get_freeze_count() > 0
    assert survivor
    gc.freeze()  # as before: what was collected is not walked through by the tests that follow
