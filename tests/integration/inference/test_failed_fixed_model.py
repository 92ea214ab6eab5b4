"""A replica of a fixed model, such as a teacher: one that it refuses, and one whose engine fails for good."""

import asyncio
from pathlib import Path

import pytest

from millrace.errors import InvalidStateError
from millrace.inference.embedded import replica as replica_module
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.replica import EmbeddedReplica
from millrace.inference.settings import InferenceSettings
from millrace.rpc.health import PROCESS
from millrace.telemetry.settings import Settings
from millrace_testing.model_files import write_tokenizer
from millrace_testing.polling import until


async def test_a_replica_that_lost_its_fixed_model_is_to_be_started_again(
    full_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"MILLRACE_LISTEN": "127.0.0.1:0", "MILLRACE_HTTP_LISTEN": "127.0.0.1:0"}
    engine = EmbeddedEngine()
    monkeypatch.setattr(replica_module, "EmbeddedEngine", lambda **options: engine)
    replica = EmbeddedReplica(Settings.from_env(environ, required=["listen", "http_listen"]), InferenceSettings())
    parts = replica.parts
    watching = asyncio.create_task(parts.watch_health())
    await parts.updater.serve_fixed(full_model_dir)
    await until(lambda: parts.board.is_serving(PROCESS), timeout_s=20)
    await engine.fail("a forward pass failed: no memory")
    await until(lambda: not parts.board.is_serving(PROCESS), timeout_s=20)
    assert "no memory" in parts.board.reason(PROCESS)
    watching.cancel()
    await engine.close()


@pytest.mark.parametrize("case", ["no template", "another tokenizer"])
async def test_a_fixed_model_whose_tokenizer_does_not_fit_is_refused(full_model_dir: Path, case: str) -> None:
    if case == "no template":
        (full_model_dir / "chat_template.jinja").unlink()
    else:
        write_tokenizer(full_model_dir, num_tokens=300)
    environ = {"MILLRACE_LISTEN": "127.0.0.1:0", "MILLRACE_HTTP_LISTEN": "127.0.0.1:0"}
    own = InferenceSettings(model_dir=full_model_dir, needs_chat_template=True)
    replica = EmbeddedReplica(Settings.from_env(environ, required=["listen", "http_listen"]), own)
    with pytest.raises(InvalidStateError) as raised:
        await asyncio.wait_for(replica.run(), 60)
    assert raised.value.reason == {"no template": "CHAT_TEMPLATE_MISSING"}.get(case, "VOCABULARY_TOO_SMALL")
