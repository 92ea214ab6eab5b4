"""What the contract tests share."""

from collections.abc import Iterator

import pytest

from millrace_testing import syntax


@pytest.fixture(autouse=True, scope="package")
def trees_are_let_go() -> Iterator[None]:
    yield
    syntax.forget()
