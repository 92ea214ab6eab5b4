"""The progress of long work: a download, a model that is loaded, an environment, a compilation, a checkpoint.

    with progress.work(Activity.DOWNLOAD, "policy 12", unit=BYTES, waits_on="object store") as work:
        work.expect(size_bytes)
        ...
        work.add(len(data))

It is a wait while it lasts, so that `millrace run why`, `watch` and the dashboard say "policy 12 to be downloaded: 3.1
of 8.0 GB (39 %)"; every few seconds it is a line of the log, which `millrace up` and `rl` show while they wait for a
service. A command on a terminal draws what is `active` instead (`cli/view/live.py`).

The code that does the work may not know its name: `add` and `expect` of the module count for the innermost work of the
context. Threads that count need the context, which `asyncio.to_thread` passes on.
"""

import contextlib
import contextvars
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Self

from millrace.telemetry import waits

logger = logging.getLogger(__name__)

SAY_EVERY_S = 5.0
"""Seconds between two lines, and from the beginning of work to its first line."""
BYTES = "bytes"
_UNITS = ("kB", "MB", "GB", "TB", "PB")


class Activity(Enum):
    """A kind of work: its words for the work itself, and for a wait for it."""

    APPLY = ("applying", "to be applied")
    DOWNLOAD = ("downloading", "to be downloaded")
    LOAD = ("loading", "to be loaded")
    RESTORE = ("restoring", "to be restored")
    SAVE = ("saving", "to be saved")

    def __init__(self, gerund: str, passive: str) -> None:
        """Take the words for the work itself ("loading") and for a wait for it ("to be loaded")."""
        self.gerund = gerund
        self.passive = passive


class LongWork:
    """A piece of work, in progress while its `with` block runs. Any thread may count."""

    def __init__(self, doing: Activity, what: str, *, unit: str, total: int, wait: waits.Waiting) -> None:
        """Make a piece of work that has not begun: `doing` is its kind, `what` its object, such as "policy 12".

        It is counted in `unit` (a plural) of `total`, 0 if that is unknown. `wait` is the wait that shows it.
        """
        self._doing = doing
        self._what = what
        self._unit = unit
        self._total = total
        self._done = 0
        self._detail = ""
        self._wait = wait
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._began = 0.0
        self._is_said = False
        self._token: contextvars.Token[LongWork | None] | None = None

    def add(self, count: int) -> None:
        """Count `count` more of the work as done; a negative number takes back work that has to be done again."""
        self._change(add=count)

    def at(self, done: int, *, total: int | None = None) -> None:
        """Set how much of the work is done, and the total unless it is None."""
        self._change(done=done, total=total)

    def expect(self, count: int) -> None:
        """Add `count` to the total of the work."""
        self._change(expect=count)

    def detail(self, text: str) -> None:
        """Set a description of the progress, shown after the amount or in its place, for work that cannot be
        counted.
        """
        with self._lock:
            self._detail = text
        self._wait.update(reason=self._reason())

    def turn_to(self, doing: Activity, what: str, *, waits_on: str | None = None) -> None:
        """Continue with other work in the same wait: `doing` is its kind, `what` its object; the count begins at 0.

        The total is unknown then. `waits_on` is the component that is waited for, None if it stays.
        """
        with self._lock:
            self._doing, self._what, self._detail = doing, what, ""
            self._done = self._total = 0
        self._wait.update(reason=self._reason(), waits_on=waits_on)

    @property
    def title(self) -> str:
        """Return what is done, in words, such as "loading the model"."""
        return f"{self._doing.gerund} {self._what}"

    @property
    def amount(self) -> str:
        """Return the progress as text, "3.1 of 8.0 GB (39 %)"; "" while it is unknown."""
        with self._lock:
            done, total, unit, detail = self._done, self._total, self._unit, self._detail
        return ", ".join(part for part in (_amount(done, total, unit), detail) if part)

    @property
    def share(self) -> float | None:
        """Return the share that is done, from 0 to 1; None if it is unknown."""
        with self._lock:
            return min(1.0, max(0.0, self._done / self._total)) if self._total > 0 else None

    def __str__(self) -> str:
        amount = self.amount
        return f"{self.title}: {amount}" if amount else self.title

    def __enter__(self) -> Self:
        """Begin the work: it is a wait from now on, and a thread writes lines about it."""
        self._began = time.monotonic()
        self._wait.__enter__()
        self._wait.update(reason=self._reason())
        self._token = _CURRENT.set(self)
        with _LOCK:
            _ACTIVE.append(self)
        context = contextvars.copy_context()  # a line is of the run that the work is for
        # A thread, because the work itself may block this one, or its event loop, for minutes.
        threading.Thread(target=context.run, args=(self._say_often,), name="progress", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """End the work and its wait.

        If lines were written about it, write how long it took, unless the block raises.
        """
        self._over.set()
        with _LOCK:
            _ACTIVE.remove(self)
        if self._token is not None:
            _CURRENT.reset(self._token)
        self._wait.__exit__(kind, error, None)
        # Work that was over before its first line gets none at all, so that the log stays short.
        if self._is_said and error is None:
            _say(f"{self}: done in {time.monotonic() - self._began:.1f} s")

    def _change(self, *, done: int | None = None, total: int | None = None, add: int = 0, expect: int = 0) -> None:
        """Set what is done and the total (None: as they are), add `add` to what is done and `expect` to the total.

        Updates the reason of the wait.
        """
        with self._lock:
            self._done = (self._done if done is None else done) + add
            self._total = (self._total if total is None else total) + expect
        self._wait.update(reason=self._reason())

    def _reason(self) -> str:
        """Return the reason of the wait: what is waited for, and the progress."""
        amount = self.amount
        waited = f"{self._what} {self._doing.passive}"
        return f"{waited}: {amount}" if amount else waited

    def _say_often(self) -> None:
        """Write a line about the work every `SAY_EVERY_S` until it is over; the target of a thread."""
        while not self._over.wait(SAY_EVERY_S):
            self._is_said = True
            age = f"{time.monotonic() - self._began:.0f} s"
            _say(f"{self}, {age}" if self.amount else f"{self}: {age}")


def work(
    doing: Activity, what: str, *, unit: str = BYTES, total: int = 0, waits_on: str = "", deadline_s: float = 0.0
) -> LongWork:
    """Return a piece of long work, which is in progress, and shown as a wait, while it is used as a context manager.

    `doing` is its kind, `what` its object, such as "policy 12". It is counted in `unit` (a plural) of `total`, 0 if
    that is unknown. `waits_on` and `deadline_s` are the wait's.
    """
    wait = waits.waiting(f"{what} {doing.passive}", waits_on=waits_on, deadline_s=deadline_s)
    return LongWork(doing, what, unit=unit, total=total, wait=wait)


def add(count: int) -> None:
    """Count `count` more as done for the innermost long work of this context, if there is any."""
    if (found := _CURRENT.get()) is not None:
        found.add(count)


def expect(count: int) -> None:
    """Add `count` to the total of the innermost long work of this context, if there is any."""
    if (found := _CURRENT.get()) is not None:
        found.expect(count)


@contextlib.contextmanager
def tried() -> Iterator[Callable[[int], None]]:
    """Yield a function that counts for the innermost work of this context.

    If the block raises, its counts are taken back. The function may be called from any thread.
    """
    # Taken here: a thread that counts later may have no context, or another one.
    found, counted = _CURRENT.get(), 0
    lock = threading.Lock()

    def count(size: int) -> None:
        """Count `size` more as done, now and in what is taken back if the block raises."""
        nonlocal counted
        if found is not None:
            with lock:
                counted += size
            found.add(size)

    try:
        yield count
    except BaseException:  # raised on: the next try counts again
        if found is not None:
            found.add(-counted)
        raise


def active() -> list[LongWork]:
    """Return the long work of this process that is in progress, oldest first."""
    with _LOCK:
        return list(_ACTIVE)


@contextlib.contextmanager
def send_lines_to(say: Callable[[str], None]) -> Iterator[None]:
    """Pass the lines about long work to `say` during this block, instead of the log."""
    global _sayer
    before, _sayer = _sayer, say
    try:
        yield
    finally:
        _sayer = before


def count_rows(found: LongWork, rows: Iterable[Any], *, total: int) -> Iterator[Any]:
    """Yield the rows, and count each for the work `found` as one of `total` when the next one is requested."""
    found.at(0, total=total)
    for number, row in enumerate(rows, 1):
        yield row
        found.at(number)


def _say(line: str) -> None:
    """Write a line about long work into the log, or where `send_lines_to` has them sent."""
    _sayer(line)


def _amount(done: int, total: int, unit: str) -> str:
    """Return the progress in words, such as `3.1 of 8.0 GB (39 %)`, `120 of 290 tensors (41 %)` or `3.1 GB`.

    `unit` is what `done` and `total` count; "" is returned if both are 0, and a `total` of 0 is unknown.
    """
    if done <= 0 and total <= 0:
        return ""
    share = f" ({min(done, total) / total:.0%})".replace("%", " %") if total > 0 else ""
    if unit != BYTES:
        return f"{done} of {total} {unit}{share}" if total > 0 else f"{done} {unit}"
    scale, name = _scale(max(done, total))
    shown = f"{done / scale:.1f}" if scale > 1 else str(done)
    whole = f"{total / scale:.1f}" if scale > 1 else str(total)
    return f"{shown} of {whole} {name}{share}" if total > 0 else f"{shown} {name}"


def _scale(size: int) -> tuple[int, str]:
    """Return the unit in which a number of bytes is shown: its size in bytes, and its name."""
    scale, name = 1, BYTES
    for unit in _UNITS:
        if size < 1000 * scale:
            break
        scale, name = scale * 1000, unit
    return scale, name


_LOCK = threading.Lock()
_ACTIVE: list[LongWork] = []
_CURRENT: contextvars.ContextVar[LongWork | None] = contextvars.ContextVar("millrace_long_work", default=None)
_sayer: Callable[[str], None] = logger.info


# Long work of Hugging Face's libraries, which report progress by a progress bar only: `tqdm`.
#
# Nothing here imports them, because code that loads a model has done so.
_LOADING = threading.Lock()
"""Lock of the hook of transformers, which all threads share."""


def counting_bar(work: LongWork) -> type:
    """Return a class for `tqdm_class` of `huggingface_hub.snapshot_download`, whose bar of bytes counts for `work`.

    Its bars draw nothing.
    """
    from huggingface_hub.utils import tqdm

    class CountingBar(tqdm):
        """Draws nothing. Of its bars, that of the bytes that are written is the one that counts."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            self._at = options.get("initial") or 0
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            """Count `n` more as done."""
            self._at += int(n or 0)
            self.refresh()

        def refresh(self, *args: Any, **options: Any) -> None:
            """Pass the count of the bar of bytes to the work; the library calls this."""
            if self._counts:
                work.at(self._at, total=int(self.total or 0))

    return CountingBar


@contextlib.contextmanager
def loading_counts(work: LongWork) -> Iterator[None]:
    """Count for `work` the tensors that transformers' `from_pretrained` loads in this block, in this thread."""
    library: Any = importlib.import_module("transformers.utils.logging")
    mine = threading.get_ident()

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the rows of a progress bar, counted for the work if they are tensors that this thread loads.

        Else the bar.

        transformers calls it with the bar's class and the arguments of its constructor.
        """
        if threading.get_ident() != mine or not args or "Loading" not in str(options.get("desc", "")):
            return factory(*args, **options)
        return count_rows(work, args[0], total=len(args[0]))

    with _LOADING:
        # The process has one hook.
        before = library.set_tqdm_hook(hook)
        try:
            yield
        finally:
            library.set_tqdm_hook(before)
