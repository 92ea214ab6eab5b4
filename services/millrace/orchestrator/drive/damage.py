"""Damaged and foreign entries of a run's rollouts and events: counted, told in an event, and removed from Redis.

They are skipped where they are met. Nothing is lost with them but what they pretend to be: a rollout is appended again
by its env-server, from its spool, or played again; an event that cannot be read is in no archive.
"""

import logging

from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.run_meters import entries_damaged
from millrace.runlog import Entry, RunLog, Stream

logger = logging.getLogger(__name__)

MAX_NAMED = 5
"""Entries that one event names."""


class DamageBook:
    """What of a run's log was skipped by this drive."""

    def __init__(self, run_log: RunLog, events: RunEvents, *, run: str) -> None:
        """`run` is the run's name."""
        self._log = run_log
        self._events = events
        self._run = run
        self._met: dict[tuple[Stream, str], str] = {}
        self.num_rollouts = 0
        """Damaged entries of the rollouts that were removed: env-servers append what is missing now."""

    def note(self, stream: Stream, entry: Entry) -> None:
        """An entry was skipped."""
        self._met.setdefault((stream, entry.id), entry.damage)

    async def tell(self) -> bool:
        """Report and remove what was met since the last call; return whether there was anything."""
        met, self._met = self._met, {}
        for stream in Stream:
            found = {id_: cause for (of, id_), cause in met.items() if of is stream}
            if found:
                entries_damaged(self._run, stream, len(found))
                logger.error(
                    "entries of the log are damaged and were skipped",
                    extra={"run": self._run, "stream": stream.value, "count": len(found)},
                )
                await self._events.warning("ENTRY_DAMAGED", _text(stream, found))
                await self._log.remove_entries(stream, list(found))
                self.num_rollouts += len(found) if stream is Stream.ROLLOUTS else 0
        return bool(met)


def _text(stream: Stream, found: dict[str, str]) -> str:
    named = "; ".join(f"{id_}: {cause}" for id_, cause in list(found.items())[:MAX_NAMED])
    more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    costs = {
        Stream.ROLLOUTS: "its env-server appends the rollout again, or it is played again",
        Stream.EVENTS: "it is in no archive",
    }[stream]
    return (
        f"redis: stream {stream} had {len(found)} damaged or foreign entries, which were skipped and removed "
        f"({named}{more}); {costs}; find out who else writes to this Redis"
    )
