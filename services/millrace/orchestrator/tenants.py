"""Which runs a caller sees: a tenant its own, an operator all.

    token ──▶ tenant (`rpc.access.calling_tenant`) ──▶ SeenRuns ──▶ runs of that tenant, or NotFoundError

A run belongs to the tenant that submitted it, as `run.json` says; a fork belongs to its parent's. The name of a
tenant's run begins with the tenant: `TENANT.NAME`. No name that a caller may choose has a dot, so every tenant has the
names to itself, nobody learns by a conflict which others are taken, and names are unique in the deployment. A tenant
may leave its own prefix out. Another tenant's run is looked for where it is not, among the caller's own, so that the
answer and the work for it are those for a run that does not exist.
"""

import re
from collections.abc import Iterable

from millrace.errors import InvalidSpecError, NotFoundError, RefusedError
from millrace.orchestrator.catalog import RunCatalog, RunView
from millrace.runlog import names
from millrace.runlog.records.run_record import UNKNOWN, RunRecord
from millrace.v1.run_service_pb2 import ExplainRunResponse

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
