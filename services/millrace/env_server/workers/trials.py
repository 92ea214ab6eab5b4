"""Which tasks of an environment end its workers: suspects, those that were cleared, and those that are quarantined.

Pure bookkeeping; `pool` plays and `probes` isolates by what stands here.

* A task is tried when a rollout of it ended in a living worker (cleared), or when it ended a worker that played it
  alone (quarantined). The last `WINDOW` trials tell what the environment is like.
* While some of them were quarantined the environment is dangerous: tasks that were not tried yet are suspects from the
  start, so that they end probe workers instead of the workers in which everything else is played.
* When most of them were quarantined it is hopeless: there is nothing to be gained from more of its tasks.
"""

from collections import OrderedDict, deque

WINDOW = 32
"""Trials that are looked at."""
DANGEROUS = 2
"""Quarantined ones among them from which on untried tasks are probed."""
HOPELESS = 8
"""Quarantined ones among them from which on the environment is given up if they are more than half."""
# Ids of tried tasks, 100 bytes each; one that falls out is tried again where the environment is dangerous.
_MAX_CLEARED = 50_000
_MAX_NAMED = 8


class TaskTrials:
    """Of one environment."""

    def __init__(self) -> None:
        self._suspects: set[str] = set()
        self._cleared: OrderedDict[str, None] = OrderedDict()
        self._quarantined: dict[str, str] = {}
        self._ends: dict[str, str] = {}
        self._trials: deque[bool] = deque(maxlen=WINDOW)

    @property
    def suspects(self) -> frozenset[str]:
        """Tasks that were in flight when a worker died."""
        return frozenset(self._suspects)

    @property
    def quarantined(self) -> dict[str, str]:
        """Tasks that are not played any more, and why."""
        return dict(self._quarantined)

    @property
    def is_dangerous(self) -> bool:
        """Whether tasks that were not tried yet are probed."""
        return sum(self._trials) >= DANGEROUS

    def why_not(self, task_id: str) -> str:
        """Why the task is not played any more; "" if it is."""
        return self._quarantined.get(task_id, "")

    def is_suspect(self, task_id: str) -> bool:
        """Whether the task is to be played alone."""
        return task_id in self._suspects or (self.is_dangerous and task_id not in self._cleared)

    def suspect(self, task_id: str) -> None:
        """The task was in flight when a worker died."""
        self._suspects.add(task_id)

    def clear(self, task_id: str) -> None:
        """A rollout of the task ended, and its worker lives."""
        self._suspects.discard(task_id)
        if task_id not in self._cleared and task_id not in self._quarantined:
            self._trials.append(False)
            self._cleared[task_id] = None
            if len(self._cleared) > _MAX_CLEARED:
                self._cleared.popitem(last=False)

    def quarantine(self, task_id: str, reason: str, *, end: str) -> None:
        """The task ended a worker that played it alone; `end` says how the worker ended."""
        self._suspects.discard(task_id)
        self._cleared.pop(task_id, None)
        if task_id not in self._quarantined:
            self._trials.append(True)
        self._quarantined[task_id] = reason
        self._ends[task_id] = end

    def hopeless(self, *, num_probing: int) -> str:
        """Why the environment is given up, or "".

        `num_probing` tasks are played alone at the moment. They count as good ones: a good rollout takes its time, and
        tasks that end their worker at once would else be over-represented.
        """
        bad, tried = sum(self._trials), len(self._trials)
        if bad < HOPELESS or 2 * bad <= tried + num_probing:
            return ""
        named = list(self._ends.items())[-_MAX_NAMED:]
        examples = "; ".join(f"task {task_id}: {end}" for task_id, end in named)
        return f"{bad} of the last {tried} tasks that were tried ended their worker, alone in it ({examples})"
