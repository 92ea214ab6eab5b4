"""A child that exchanges frames with the process that started it, and every way in which one of the two ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.errors import CorruptObjectError
from millrace.processes.channel import ChildLink, pack_frame, read_frame, receive_frame
from millrace.processes.table import is_running
from millrace_testing.polling import until

MODULE = "millrace_testing.echo_child"
MOST = 1 << 24


@pytest.fixture
async def child() -> AsyncIterator[ChildLink]:
    started = await ChildLink.start(MODULE, {})
    yield started
    await started.end()


async def test_frames_of_any_length_come_back_in_order(child: ChildLink) -> None:
    texts = [b"", "ü".encode(), bytes(range(256)) * 9000, b"\n{}"]
    sending = asyncio.create_task(asyncio.wait_for(_send_all(child, texts), 60))
    assert [await asyncio.wait_for(child.receive(most=MOST), 60) for _ in texts] == texts
    await sending


async def _send_all(child: ChildLink, texts: list[bytes]) -> None:
    for text in texts:
        await child.send(text)


async def test_what_is_printed_goes_to_the_log_and_is_no_frame(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = await ChildLink.start(MODULE, {}, stderr=log)
    await child.send(b"hello")
    assert await asyncio.wait_for(child.receive(most=MOST), 60) == b"hello"
    await child.end()
    assert (tmp_path / "log").read_bytes() in (b"", b"a library's own words\n"), "a killed process may keep its buffer"


async def test_a_frame_that_is_too_long_is_refused_by_its_reader(child: ChildLink) -> None:
    await child.send(b"x" * 1000)
    with pytest.raises(CorruptObjectError, match="1000 bytes, the most is 999") as caught:
        await asyncio.wait_for(child.receive(most=999), 60)
    assert caught.value.reason == "FRAME_TOO_LONG"


async def test_a_killed_child_ends_the_conversation(child: ChildLink) -> None:
    await child.send(b"hello")
    assert await asyncio.wait_for(child.receive(most=MOST), 60) == b"hello"
    os.kill(child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(child.receive(most=MOST), 60) is None
    await until(lambda: child.is_ended)
    child.post(b"nobody reads this")
    with pytest.raises(OSError):
        for _ in range(100):
            await child.send(b"x" * 65536)


async def test_a_program_that_it_starts_takes_no_frame_from_its_standard_input() -> None:
    child = await ChildLink.start(MODULE, {"starts": "a reader"})
    await child.send(b"hello")
    assert (await asyncio.wait_for(child.receive(most=MOST), 60) or b"").strip() == b"0"
    assert await asyncio.wait_for(child.receive(most=MOST), 60) == b"hello"
    await child.end()


async def test_its_end_ends_what_it_has_started() -> None:
    child = await ChildLink.start(MODULE, {"starts": "another"})
    pid = int(await asyncio.wait_for(child.receive(most=MOST), 60) or b"0")
    assert is_running(pid)
    await child.end()
    assert child.is_ended
    await until(lambda: not is_running(pid))
    await child.end()


def test_it_ends_with_its_parent() -> None:
    program = (
        "import asyncio, os\n"
        "from millrace.processes.channel import ChildLink\n"
        f"child = asyncio.run(ChildLink.start({MODULE!r}, {{}}))\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=True)
    pid = int(found.stdout)
    asyncio.run(until(lambda: not is_running(pid)))


@pytest.mark.parametrize("cut", [1, 4, 9])
async def test_a_stream_that_ends_in_the_middle_of_a_frame_has_no_more(cut: int) -> None:
    data = pack_frame(b"whole") + pack_frame(b"half of it")[:cut]
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    assert [await read_frame(reader, most=MOST) for _ in range(2)] == [b"whole", None]
    left = bytearray(data)

    def read(count: int) -> bytes:
        part = bytes(left[: min(count, 3)])
        del left[: len(part)]
        return part

    assert [receive_frame(read, most=MOST) for _ in range(2)] == [b"whole", None]
