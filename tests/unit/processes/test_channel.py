"""What processes of ours say to each other: whole messages, open files, and the end of the other side."""

import asyncio
import os
from typing import Any

import pytest

from millrace.errors import CorruptObjectError
from millrace.processes.channel import MAX_MESSAGE_BYTES, Channel
from millrace.processes.sessions import describe_exit


def test_a_message_arrives_with_its_files() -> None:
    ours, theirs = Channel.pair()
    read, write = os.pipe()
    ours.send({"text": "ü" * 1000, "number": 7}, [write])
    os.close(write)
    received = theirs.receive(timeout_s=60)
    assert received is not None and received[0] == {"text": "ü" * 1000, "number": 7}
    [number] = received[1]
    os.write(number, b"x")
    assert os.read(read, 1) == b"x"
    for each in (read, number):
        os.close(each)


def test_the_end_of_the_other_side_is_the_end_of_the_channel() -> None:
    ours, theirs = Channel.pair()
    ours.send({"last": True})
    ours.close()
    ours.close()
    assert theirs.receive(timeout_s=60) == ({"last": True}, [])
    assert theirs.receive(timeout_s=60) is None
    with pytest.raises(OSError):
        theirs.send({})


def test_silence_and_what_is_too_long_are_errors() -> None:
    ours, theirs = Channel.pair()
    with pytest.raises(TimeoutError):
        theirs.receive(timeout_s=0.05)
    with pytest.raises(ValueError, match=f"the most is {MAX_MESSAGE_BYTES}"):
        ours.send({"text": "x" * MAX_MESSAGE_BYTES})
    ours.send({"still": "open"})
    assert theirs.receive(timeout_s=60) == ({"still": "open"}, [])


async def test_an_event_loop_hears_messages_in_order_and_the_end_once() -> None:
    ours, theirs = Channel.pair()
    heard: list[Any] = []
    over = asyncio.Event()
    ours.listen(heard.append, lambda why: (heard.append(why), over.set()))
    for number in range(3):
        theirs.send({"number": number})
    theirs.close()
    await asyncio.wait_for(over.wait(), 5)
    assert heard == [{"number": 0}, {"number": 1}, {"number": 2}, "it ended"]


async def test_what_is_no_message_ends_the_channel() -> None:
    ours, theirs = Channel.pair()
    why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ours.listen(lambda message: None, why.set_result)
    os.write(theirs.fileno(), b"\xff{")
    assert "a message between processes of Millrace" in await asyncio.wait_for(why, 5)
    again, other = Channel.pair()
    os.write(other.fileno(), b"[1]")
    with pytest.raises(CorruptObjectError):
        again.receive(timeout_s=60)


async def test_who_closes_it_hears_nothing_more() -> None:
    ours, theirs = Channel.pair()
    heard: list[Any] = []

    def take(message: dict[str, Any]) -> None:
        heard.append(message)
        ours.close()

    ours.listen(take, heard.append)
    theirs.send({"first": 1})
    theirs.send({"second": 2})
    await asyncio.sleep(0.1)
    assert heard == [{"first": 1}]


def test_an_end_is_described() -> None:
    assert [describe_exit(code) for code in (0, 17, -9, -40)] == [
        "exit code 0",
        "exit code 17",
        "signal SIGKILL",
        "signal 40",
    ]
