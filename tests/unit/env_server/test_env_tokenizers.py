"""Tokenizer files that are downloaded twice at once: who asked first was cancelled, and its thread goes on."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.env_server import tokenizer_files
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace_testing.polling import until


async def test_a_download_whose_caller_was_cancelled_does_not_spoil_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_here = threading.Barrier(2)

    def pull(store: object, manifest: object) -> dict[str, bytes]:
        both_are_here.wait(10.0)
        return {"tokenizer.json": b"{}"}

    files = [SimpleNamespace(name="tokenizer.json", sha256="ab")]
    monkeypatch.setattr(tokenizer_files, "read_manifest", lambda store, key: SimpleNamespace(files=files))
    monkeypatch.setattr(tokenizer_files, "pull_files", pull)
    nothing: Any = None
    tokenizers = TokenizerFiles(nothing, parent=tmp_path)
    try:
        cancelled = asyncio.create_task(tokenizers.directory("policies/0000-00000000/manifest.json"))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        found = Path(await tokenizers.directory("policies/0000-00000000/manifest.json"))
        assert (found / "tokenizer.json").read_bytes() == b"{}"
        await until(lambda: not list(found.parent.glob("tmp*")), what="nothing is left of the other one")
    finally:
        tokenizers.close()
