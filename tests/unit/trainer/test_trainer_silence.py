"""The trainer tells its run of a silent orchestrator, and says that it is idle when it is."""

import asyncio
import threading
import time
from collections import Counter

from millrace.errors import LogGoneError
from millrace.internal.v1.worker_service_pb2 import Assignment, HeartbeatResponse
from millrace.rpc.health import HealthBoard
from millrace.rpc.worker import Silence
from millrace.telemetry import waits
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.worker import SilenceReporter, TrainerWorker
from millrace.v1 import event_pb2


def silence(*, is_over: bool) -> Silence:
    return Silence(orchestrator="127.0.0.1:7", seconds=16.2, is_over=is_over, problem="no answer within 5 s")


async def test_a_silence_and_its_end_are_events_of_the_run_that_is_trained() -> None:
    reporter, told = SilenceReporter(), asyncio.Queue[event_pb2.Event]()
    reporter.on_silence(silence(is_over=False))  # no run: nobody to tell
    with reporter.reporting_to(told.put):
        reporter.on_silence(silence(is_over=False))
        reporter.on_silence(silence(is_over=True))
        events = [(await told.get()).warning, (await told.get()).warning]
    reporter.on_silence(silence(is_over=False))
    assert [event.reason for event in events] == ["ORCHESTRATOR_SILENT", "ORCHESTRATOR_BACK"]
    assert "the orchestrator at 127.0.0.1:7 has not answered for 16 s (no answer within 5 s)" in events[0].message
    assert events[1].message == "the orchestrator at 127.0.0.1:7 answers again after 16 s of silence"
    await asyncio.sleep(0)
    assert told.empty()


async def test_a_log_that_is_gone_does_not_matter() -> None:
    async def fail(_: event_pb2.Event) -> None:
        failed.set()
        raise LogGoneError("gone")

    reporter, failed = SilenceReporter(), asyncio.Event()
    with reporter.reporting_to(fail):
        reporter.on_silence(silence(is_over=False))
        async with asyncio.timeout(5):
            await failed.wait()


def test_an_idle_trainer_says_so_and_waits_in_a_run_are_of_the_run() -> None:
    worker = TrainerWorker(board=HealthBoard())
    seen: list[tuple[str, str, str]] = []

    def shown() -> list[tuple[str, str, str]]:
        return [(wait.reason, wait.waits_on, wait.run) for wait in waits.snapshot("t")]

    before = Counter(shown())  # of other tests in this process

    def look() -> None:
        seen.extend((Counter(shown()) - before).elements())

    def job(uid: str) -> None:
        with waits.waiting("batch 0", waits_on="orchestrator"):
            look()
        worker.stop()

    def assign() -> None:
        ends = time.monotonic() + 20
        while not (Counter(shown()) - before) and time.monotonic() < ends:
            time.sleep(0.01)
        look()
        worker.on_answer(HeartbeatResponse(assignments=[Assignment(run_uid="r-1")]))

    agent = threading.Thread(target=assign)
    agent.start()
    worker.run(job, gang=Gang())
    agent.join(20)
    assert seen == [
        ("a run to be assigned (it is idle)", "orchestrator", ""),
        ("batch 0", "orchestrator", "r-1"),
    ]
