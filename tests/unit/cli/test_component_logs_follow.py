"""Following a component's log says why it ends, where that is not the end of the run."""

from pathlib import Path

import pytest

from millrace.cli.log_files import LogQuery, show_shared
from millrace.client import Client
from millrace.errors import PermissionDeniedError
from millrace.rpc.status import abort
from millrace.v1.run_service_pb2_grpc import RunServiceServicer
from millrace_testing.local.stack_files import write_stack
from millrace_testing.runlog.fake_runs import served


class Refusing(RunServiceServicer):
    async def WatchRun(self, request, context):
        await abort(context, PermissionDeniedError("the token was revoked", reason="REVOKED"))
        yield  # never reached: makes it a generator


async def test_a_follower_that_is_refused_does_not_look_like_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "outputs" / "local" / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").write_text("2026-01-01T00:00:00.000Z INFO trainer step completed run=x\n")
    async with served(Refusing()) as address, Client(address) as client:
        write_stack(logs.parent, address, logs=str(logs))
        query = LogQuery(component="trainer", is_follow=True)
        with pytest.raises(PermissionDeniedError, match="revoked"):
            await show_shared(client, query, uid="u", name="x")
    assert "step completed" in capsys.readouterr().out
