"""What tests of commands and clients share: most servers that they name are not there."""

from collections.abc import Iterator

import pytest

from millrace_testing.quick_retries import quick_retries


@pytest.fixture(autouse=True, scope="package")
def no_server_is_waited_for() -> Iterator[None]:
    with quick_retries():
        yield
