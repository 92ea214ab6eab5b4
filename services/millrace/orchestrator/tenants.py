"""Which runs a caller sees: a tenant its own, an operator all.

    token ──▶ tenant (`rpc.access.calling_tenant`) ──▶ SeenRuns ──▶ runs of that tenant, or NotFoundError

A run belongs to the tenant that submitted it, as `run.json` says; a fork belongs to its parent's. The name of a
tenant's run begins with the tenant: `TENANT.NAME`. No name that a caller may choose has a dot, so every tenant has the
names to itself, nobody learns by a conflict which others are taken, and names are unique in the deployment. A tenant
may leave its own prefix out. Another tenant's run is looked for where it is not, among the caller's own, so that the
answer and the work for it are those for a run that does not exist.
"""

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from millrace.errors import InvalidSpecError, MillraceError, NotFoundError, RefusedError, UnavailableError
from millrace.orchestrator.catalog import RunCatalog, RunView
from millrace.runlog import names
from millrace.runlog.records.run_record import UNKNOWN, RunRecord
from millrace.runlog.token_use import TokenUse, load_use
from millrace.storage import ObjectStore
from millrace.telemetry import waits
from millrace.v1.run_service_pb2 import ExplainRunResponse, TenantUsage

logger = logging.getLogger(__name__)

_UID = re.compile(r"\b[0-9a-f]{28}\b")


def belongs_to(record: RunRecord, tenant: str) -> bool:
    """Return whether a run is one of a tenant's, or `tenant` is empty: an operator's are all.

    One whose `run.json` cannot be read is known by its name.
    """
    owner = names.tenant_of(record.name) if record.kind == UNKNOWN else record.tenant
    return not tenant or owner == tenant


class SeenRuns:
    """The runs of a deployment that one caller sees. It has the methods of `RunCatalog` by which runs are found."""

    def __init__(self, catalog: RunCatalog, tenant: str) -> None:
        """Make the view of a tenant, or with an empty `tenant` that of an operator, on the runs of `catalog`."""
        self.tenant = tenant
        self._catalog = catalog

    def of(self, tenant: str) -> "SeenRuns | None":
        """Return those of the runs that are a tenant's, all for an empty `tenant`; None if the caller sees none."""
        if tenant in ("", self.tenant):
            return self
        return None if self.tenant else SeenRuns(self._catalog, tenant)

    @property
    def views(self) -> list[RunView]:
        """Return the views in memory of the runs that the caller sees."""
        return self._seen(self._catalog.views)

    async def refresh(self) -> list[RunView]:
        """Return the views of the runs that may not have ended, oldest first (`RunCatalog.refresh`)."""
        return self._seen(await self._catalog.refresh())

    async def list_names(self) -> list[tuple[str, str]]:
        """Return uid and name of every run that the caller sees, the newest first (`RunCatalog.list_names`)."""
        listed = await self._catalog.list_names()
        return [each for each in listed if not self.tenant or names.tenant_of(each[1]) == self.tenant]

    async def read_listed(self, runs: Iterable[tuple[str, str]]) -> list[RunView]:
        """Return the views of these runs of `list_names`, in the same order (`RunCatalog.read_listed`)."""
        return self._seen(await self._catalog.read_listed(runs))

    async def find(self, name: str) -> RunView:
        """Return the run of this name or uid as it is now (`RunCatalog.find`).

        NotFoundError, with the same text and after the same reads, if there is none or the caller does not see it.
        """
        if not self.tenant:
            return await self._catalog.find(name)
        listed = {names.within(self.tenant, each): (uid, each) for uid, each in await self.list_names()}
        wanted = names.within(self.tenant, name.removeprefix("runs/"))
        found = names.resolve(wanted, {short: uid for short, (uid, _) in listed.items()}, is_exact=True)
        uid, whole = listed[found]
        if names.is_uid(uid):
            view = await self._catalog.look_at(uid, whole, is_looked_at=True)
        else:  # its entry in the index is damaged: nobody can say which run it is
            (view,) = await self._catalog.read_listed([listed[found]])
        if not belongs_to(view.record, self.tenant):
            raise NotFoundError(f"run {wanted!r} does not exist", reason="RUN_NOT_FOUND", metadata={"run": wanted})
        return view

    def known(self, name: str) -> RunView | None:
        """Return the view in memory of a run that the caller sees (`RunCatalog.known`); None if there is none."""
        if not self.tenant:
            return self._catalog.known(name)
        views = {names.within(self.tenant, view.record.name): view for view in self.views}
        uids = {short: view.record.uid for short, view in views.items()}
        try:
            return views[names.resolve(names.within(self.tenant, name.removeprefix("runs/")), uids)]
        except (NotFoundError, InvalidSpecError):
            return None

    def without_others(self, text: str, *, uid: str = "") -> str:
        """Return a text for a tenant without the uids of any run but `uid`; an operator gets it as it is.

        Waits that belong to no run may name the run that a process is busy with.
        """
        if not self.tenant:
            return text
        return _UID.sub(lambda match: match[0] if match[0] == uid else "…", text)

    def without_others_in(self, problem: RefusedError, *, uid: str) -> RefusedError:
        """Return an error of the run `uid` as the caller may read it (`without_others`)."""
        message = self.without_others(problem.message, uid=uid)
        return RefusedError(message, reason=problem.reason, remedy=problem.remedy, metadata=problem.metadata)

    def shown(self, found: ExplainRunResponse, *, uid: str) -> ExplainRunResponse:
        """Return the explanation of the run `uid` as the caller may read it (`without_others`), changed in place."""
        found.summary = self.without_others(found.summary, uid=uid)
        for wait in found.waits:
            wait.reason = self.without_others(wait.reason, uid=uid)
        return found

    def _seen(self, views: Iterable[RunView]) -> list[RunView]:
        """Return those of the views that the caller sees, in their order."""
        return [view for view in views if belongs_to(view.record, self.tenant)]


# What runs have used. Of each run the newest header and a list of its objects are read, and kept for a while.

OPEN_S, ENDED_S = 15.0, 3600.0
"""How long what was read of an open run, and of an ended one, is kept."""
READ_S = 20.0
"""How long a caller waits for runs to be read."""
KEEP_S = 60.0
"""How often the use of all runs is read for metrics."""
PAGE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What was read of a run."""

    at: float
    state: object
    """State of the run then: another one is read again."""
    is_over: bool
    """It had ended: unless it is open again, it is not looked at while what was read is kept."""
    tenant: str
    accelerator_seconds: float
    tokens: TokenUse
    stored_bytes: int


class UsageReader:
    """Reads what runs have used, for all callers."""

    def __init__(self, store: ObjectStore, prefix: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a reader of the runs in `store` below `prefix`, which has read nothing."""
        self._store, self._prefix, self._clock = store, prefix, clock
        self._known: dict[str, _Read] = {}
        self._one_pass = asyncio.Lock()
        self.totals: Mapping[str, TenantUsage] = {}
        """What all runs had used when they were read last, by tenant; empty before that."""

    async def read(self, seen: SeenRuns) -> list[TenantUsage]:
        """Return what the runs that a caller sees have used, by tenant.

        One pass goes on at a time. Raise UnavailableError if not all runs are read within `READ_S`; what was read then
        is kept for the next try.
        """
        found, listed = list[_Read](), await seen.list_names()
        try:
            with waits.waiting("the use of runs to be read", waits_on="object store"):
                async with asyncio.timeout(READ_S), self._one_pass:
                    opened = {view.record.uid for view in seen.views if not view.is_terminal}
                    for first in range(0, len(listed), PAGE):
                        page = listed[first : first + PAGE]
                        kept = {uid: known for uid, _ in page if (known := self._kept(uid, opened)) is not None}
                        found += kept.values()
                        for view in await seen.read_listed([each for each in page if each[0] not in kept]):
                            found.append(await self._read(view))
        except TimeoutError:
            raise UnavailableError(
                f"{len(found)} of {len(listed)} runs are read",
                reason="USAGE_GROWING",
                remedy="ask again: it goes on from there",
            ) from None
        used = _sums(found)
        if not seen.tenant:
            self.totals = used
            for uid in self._known.keys() - {uid for uid, _ in listed}:
                del self._known[uid]  # it was deleted
        return [each for _, each in sorted(used.items())]

    async def keep(self, catalog: RunCatalog) -> None:
        """Read the use of all runs every `KEEP_S`, for metrics, until cancelled; nothing where no run is a tenant's."""
        # unregistered wait: a pause between two looks, which register their own
        while True:
            await asyncio.sleep(KEEP_S)
            if any(view.record.tenant for view in catalog.views):
                try:
                    await self.read(SeenRuns(catalog, ""))
                except MillraceError as error:
                    logger.info("the use of runs is not read to the end", extra={"error": error.message})

    def _kept(self, uid: str, opened: Container[str]) -> _Read | None:
        """Return what is known of an ended run, so that it need not be looked at; None if it has to be.

        `opened` are the runs in memory that have not ended: it may have been reopened.
        """
        known = self._known.get(uid)
        is_kept = known is not None and known.is_over and uid not in opened and self._clock() - known.at < ENDED_S
        return known if is_kept else None

    async def _read(self, view: RunView) -> _Read:
        """Read a run, unless what is known of it is new enough, and return what is known then."""
        uid, now, state = view.record.uid, self._clock(), (view.run.state, view.status.committed)
        known = self._known.get(uid)
        seconds = view.status.usage.seconds(time.time())
        if known is not None and known.state == state and now - known.at < (ENDED_S if view.is_terminal else OPEN_S):
            self._known[uid] = known = replace(known, accelerator_seconds=seconds)
            return known
        try:
            tokens, stored_bytes = await asyncio.to_thread(load_use, self._store, names.Names(self._prefix, uid))
        except UnavailableError:
            raise
        except MillraceError:
            # A run that is damaged, or was deleted meanwhile, has used what is known of it.
            tokens, stored_bytes = (known.tokens, known.stored_bytes) if known is not None else (TokenUse(), 0)
        self._known[uid] = found = _Read(
            at=now,
            state=state,
            is_over=view.is_terminal,
            tenant=view.record.tenant,
            accelerator_seconds=seconds,
            tokens=tokens,
            stored_bytes=stored_bytes,
        )
        return found


def _sums(runs: Iterable[_Read]) -> Mapping[str, TenantUsage]:
    """Return by tenant what these runs have used."""
    found: dict[str, TenantUsage] = defaultdict(TenantUsage)
    for read in runs:
        total = found[read.tenant]
        total.tenant = read.tenant
        total.num_runs += 1
        total.accelerator_seconds += read.accelerator_seconds
        total.prompt_tokens += read.tokens.prompt
        total.sampled_tokens += read.tokens.sampled
        total.stored_bytes += read.stored_bytes
    return found
