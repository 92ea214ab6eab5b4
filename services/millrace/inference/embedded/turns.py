"""The requests that wait for a row. Calls take turns: one with hundreds of requests does not go before all others.

All of this belongs to the engine's thread.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator

from millrace.inference.embedded.rows import Running


class Turns:
    """Waiting requests by call, in the order in which the calls are next; within a call in order of arrival."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, OrderedDict[str, Running]] = OrderedDict()
        self._call_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._call_of)

    def push(self, entry: Running) -> bool:
        """Queue a request, a call that has none yet as the last one; False if its id waits already."""
        request = entry.request
        if request.request_id in self._call_of:
            return False
        self._calls.setdefault(request.turn, OrderedDict())[request.request_id] = entry
        self._call_of[request.request_id] = request.turn
        return True

    def next(self, shut: Container[str] = ()) -> Running | None:
        """The request whose turn it is, without those of the calls in `shut`; None if there is none."""
        for turn, entries in self._calls.items():
            if turn not in shut:
                return next(iter(entries.values()))
        return None

    def take(self, entry: Running) -> Running:
        """Take a request out; its call is the last one then."""
        turn = entry.request.turn
        self.remove(entry.request.request_id)
        if turn in self._calls:
            self._calls.move_to_end(turn)
        return entry

    def remove(self, request_id: str) -> Running | None:
        """Take a request out without a turn; None if it does not wait."""
        turn = self._call_of.pop(request_id, None)
        if turn is None:
            return None
        entry = self._calls[turn].pop(request_id)
        if not self._calls[turn]:
            del self._calls[turn]
        return entry

    def all(self) -> Iterator[Running]:
        """Every request, by calls."""
        for entries in self._calls.values():
            yield from entries.values()
