"""One base model for the tests of `millrace tinker`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_testing.model_files import make_qwen3, write_tokenizer
from millrace_testing.tinker import Server


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(make_qwen3(tmp_path_factory.mktemp("base"), is_tied=True), num_tokens=48)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), base)
    server.start()
    yield server
    server.stop()
