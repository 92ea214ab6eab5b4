"""The policy on a node that cannot read the head's files: pulled by a worker of that node from the object store.

    head            ──▶ order, with the manifest's key and the policy's digest ──▶ a worker of each node (`fetch`)
    other nodes     host copy as on the head: chain, sha256, digests; a file of the changes; `order.json` for all ranks
    head            ◀── done, or the error, of every rank (`fetched`), while the old version serves
    other nodes     `stage` and all later steps read this node's files in place of the head's

A node's copy is downloaded once, however many ranks it has: the first worker that gets the node's lock pulls for all.
It does so in a thread, so that its rank takes part in every step meanwhile.
"""

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.errors import CorruptObjectError, InternalError
from millrace.inference.vllm.ranks import write_order
from millrace.policies.host_copy import HostCopy
from millrace.storage import open_store
from millrace.storage.scratch import scratch_parent
from millrace.telemetry.settings import Settings

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "MILLRACE_NODE_DIR"
"""Variable that the launcher sets for the processes of its node, with the directory that its ranks share."""
_ORDER = "order.json"


class NodeCopy:
    """One rank's part in the copy of its node."""

    def __init__(self, directory: Path, copy: HostCopy) -> None:
        """Take the directory that the node's ranks share, and the host copy into which policies are fetched there."""
        self._directory = directory
        self._copy = copy
        self._lock = (directory / "puller.lock").open("w")  # held for as long as this process lives
        self.is_puller = False
        self._pulling: tuple[str, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy-of-node")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "NodeCopy":
        """Make this rank's part in the copy of its node, with the object store that `environ` names.

        The copy is in the directory that the launcher made. Without a launcher each rank has a directory, and pulls,
        for itself.
        """
        settings = Settings.from_env(environ, required=["store_url"])
        shared = environ.get(DIRECTORY_VARIABLE)  # without a launcher each rank for itself
        directory = Path(shared or tempfile.mkdtemp(prefix="millrace-node-", dir=scratch_parent()))
        return cls(directory, HostCopy(open_store(settings.require("store_url")), directory=directory))

    def begin(self, order: Mapping[str, Any]) -> None:
        """Begin to pull an order's policy in a thread, if this rank is, or becomes, the one of its node that pulls.

        Else do nothing.
        """
        if not self.is_puller:
            try:
                # The kernel releases the lock when its holder dies, so that another rank of the node pulls from then
                # on.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            self.is_puller = True
        self._pulling = order["number"], self._thread.submit(self._pull, dict(order))

    def is_there(self, number: str) -> bool:
        """Return whether this node has the files of the order with this number.

        Raises InternalError if it failed to get them.
        """
        if self._pulling is not None and self._pulling[0] == number and self._pulling[1].done():
            error = self._pulling[1].exception()  # not even that could be written
            if error is not None:
                raise _failed(f"{type(error).__name__}: {error}")
        found = self._read()
        if found.get("number") != number:
            return False
        if "error" in found:
            raise _failed(found["error"])
        return True

    def here(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the order with the paths of this node's files in place of the head's.

        Raises InternalError if they were not fetched.
        """
        found = self._read()
        if found.get("number") != order["number"]:
            raise InternalError("the node has not fetched this order", reason="NODE_FETCH_FAILED", remedy="try again")
        return found if order["changed"] is not None else found | {"changed": None}

    def _pull(self, order: dict[str, Any]) -> None:
        """Pull an order's policy, and write the node's own order, or the error, to `order.json` for all ranks of
        the node.
        """
        try:
            found = self._stage(order["policy"])
        except Exception as error:  # the edge of a thread that nobody awaits: the head gets the error
            logger.exception("the node could not fetch the policy")
            self._copy.forget()
            found = {"error": f"{type(error).__name__}: {error}"}
        path = self._directory / _ORDER
        # Other ranks read the file at any time, so it appears whole by a rename.
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(found | {"number": order["number"]}))
        fresh.rename(path)

    def _stage(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """Fetch the policy that the order describes into this node's host copy, and return the node's own order for it.

        Raises CorruptObjectError if it is not the head's policy, and the store's errors.
        """
        base = None if policy["base"] is None else tuple(policy["base"])
        if base is None:
            self._copy.forget()  # the head begins anew, perhaps because what was held is not trusted
        staged = self._copy.stage(policy["manifest_key"])
        if staged.manifest.digest != policy["digest"]:
            raise CorruptObjectError(
                f"manifest {policy['manifest_key']} has digest {staged.manifest.digest} here, and {policy['digest']} "
                "on the head",
                reason="POLICY_MANIFEST_MISMATCH",
                remedy="give all nodes the same MILLRACE_STORE_URL",
            )
        if staged.base != base:
            staged = replace(staged, changes=None, base=None)
        logger.info(
            "the node has the policy", extra={"version": staged.manifest.version, "bytes": staged.fetched_bytes}
        )
        return write_order(staged, self._directory)

    def _read(self) -> dict[str, Any]:
        """Return the content of the node's `order.json`; {} if there is none yet."""
        try:
            return json.loads((self._directory / _ORDER).read_text())
        except FileNotFoundError:
            return {}


class FetchingWorker:
    """The methods of the worker extension by which a rank gets the files of an order."""

    millrace_node: NodeCopy | None = None

    def millrace_fetch(self, order: dict[str, Any]) -> None:
        """Begin to pull the policy of an order to this node; do nothing on the head's node, which has the files."""
        if self.parallel_config.node_rank == 0:  # pyright: ignore[reportAttributeAccessIssue] - of the worker
            return
        if self.millrace_node is None:
            self.millrace_node = NodeCopy.from_env(os.environ)
        self.millrace_node.begin(order)

    def millrace_fetched(self, number: str) -> bool:
        """Return whether this rank can read the files of the order with this number.

        Raises InternalError if they could not be fetched.
        """
        return self.millrace_node is None or self.millrace_node.is_there(number)

    def _millrace_here(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the order with files that this rank can read: its node's own, or the head's."""
        return order if self.millrace_node is None else self.millrace_node.here(order)


def _failed(why: str) -> InternalError:
    """Make the error for a node that could not fetch the policy."""
    return InternalError(f"the node could not fetch the policy: {why}", reason="NODE_FETCH_FAILED", remedy="try again")
