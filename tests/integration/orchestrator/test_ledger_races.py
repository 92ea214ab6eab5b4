"""What arrives at an awkward moment: while a batch is being committed, or while nobody reads the run's rollouts."""

import pytest
from orchestrator_fakes import make_rollout
from orchestrator_runs import create, resolutions, states, until, watch

from millrace.orchestrator import ledger as ledger_module
from millrace.orchestrator.ledger import Ledger
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import encode_rollout
from millrace.runlog import Lease, RunLog, Stream


async def log_of(stack, run) -> RunLog:
    return await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)


@pytest.fixture
def ledgers(monkeypatch) -> list[Ledger]:
    """Every ledger that is made, in order."""
    found: list[Ledger] = []
    restore = Ledger.restore

    def noting(self, *args, **options) -> None:
        found.append(self)
        restore(self, *args, **options)

    monkeypatch.setattr(Ledger, "restore", noting)
    return found


async def let_it_read(stack, run, ledger: Ledger, request, member: int, status: RolloutStatus) -> None:
    """Append a rollout and return when the orchestrator has taken it."""
    log = await log_of(stack, run)
    (await log.append_rollout(encode_rollout(make_rollout(request, member, status, 0)))).require("rollout")
    newest = await log.last_id(Stream.ROLLOUTS)
    await until(lambda: ledger._stream.newest == newest, what="the orchestrator reads it")


async def test_a_late_rollout_of_an_ordinal_that_is_being_committed_does_not_open_it_again(
    stack, ledgers, monkeypatch
) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    commit, late = ledger_module.commit_batch, []

    async def commit_slowly(log, epoch, header, chunks, archive) -> bytes:
        if header.step == 1:
            late.append(header.resolutions[0].ordinal)
            await let_it_read(stack, run, ledgers[0], env.plays_of(late[0])[0], 1, RolloutStatus.TIMEOUT)
        return await commit(log, epoch, header, chunks, archive)

    monkeypatch.setattr(ledger_module, "commit_batch", commit_slowly)
    run = await create(stack)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    resolutions(trainer.steps)
    assert late and len(env.plays_of(late[0])) == 1, "it was not played again"


async def test_what_is_dropped_while_the_lease_is_renewed_before_a_commit_is_not_forgotten(
    stack, ledgers, monkeypatch
) -> None:
    env, _, trainer = await stack.env_server(silent={3}), await stack.inference(), await stack.trainer()
    renew, stale = Lease.renew, []

    async def renew_slowly(self, *, epoch: int = 0) -> bool:
        if stale:
            stale.clear()
            await until(lambda: env.plays_of(3))
            await let_it_read(stack, run, ledgers[0], env.plays_of(3)[0], 0, RolloutStatus.QUARANTINED)
        return await renew(self, epoch=epoch)

    monkeypatch.setattr(Lease, "may_write", property(lambda self: not stale))
    run = await create(stack, max_steps=4)
    await until(lambda: trainer.headers)
    monkeypatch.setattr(Lease, "renew", renew_slowly)
    stale.append(True)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert resolutions(trainer.steps)[3][1] == "quarantined"
