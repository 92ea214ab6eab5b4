"""The client of the dashboard's reader: whose question is answered by which process."""

import asyncio
from pathlib import Path

import pytest

from millrace.errors import UnavailableError
from millrace.readers.dashboard import reading
from millrace.readers.dashboard.answers import numbered, split_number
from millrace.readers.dashboard.reading import ReaderClient
from millrace_testing.polling import until


class Link:
    """The way to a reader that is played here: its questions are in `asked`, and it says what is put into `said`."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_ended = False

    async def send(self, data: bytes) -> None:
        self.asked.append(split_number(data)[0])

    async def receive(self, *, most: int) -> bytes | None:
        return await self.said.get()

    async def end(self) -> None:
        self.is_ended = True


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    """Return the readers that are started, in order."""
    started: list[Link] = []

    class Links:
        @staticmethod
        async def start(module: str, order: dict[str, str]) -> Link:
            started.append(Link())
            return started[-1]

    monkeypatch.setattr(reading, "ChildLink", Links)
    return started


async def asked(client: ReaderClient, links: list[Link], number: int) -> asyncio.Task[reading.ReaderAnswer]:
    """Ask a question, and return its task once it is sent."""
    task = asyncio.create_task(client.ask("overview", "u", {}))
    await until(lambda: any(number in link.asked for link in links), what=f"question {number} is sent")
    return task


async def test_the_death_of_a_reader_fails_no_question_of_the_next_one(links: list[Link], tmp_path: Path) -> None:
    client = ReaderClient(store_url="file:///s", prefix="p", directory=tmp_path)
    first = await asked(client, links, 1)
    links[0].is_ended = True  # it was collected, and its output is not read to the end yet
    second = await asked(client, links, 2)
    assert [link.asked for link in links] == [[1], [2]]
    links[0].said.put_nowait(None)
    with pytest.raises(UnavailableError, match="the process that reads for the dashboard died"):
        await first
    links[1].said.put_nowait(numbered(2, b"200{}"))
    assert await second == reading.ReaderAnswer(status=200, body=b"{}")
    await client.close()


async def test_closing_ends_every_reader(links: list[Link], tmp_path: Path) -> None:
    client = ReaderClient(store_url="file:///s", prefix="p", directory=tmp_path)
    first = await asked(client, links, 1)
    links[0].is_ended = True
    second = await asked(client, links, 2)
    await client.close()
    for task in (first, second):
        with pytest.raises(UnavailableError) as caught:
            await task
        assert caught.value.reason == "READER_DIED"
