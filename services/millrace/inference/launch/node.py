"""A replica over several nodes: what the launcher does on each of them.

The head (node rank 0) serves and registers as any replica does. On the other nodes the launcher starts vLLM's headless
workers with the same flags, answers nobody, and ends when the head's vLLM has ended: all of a replica begins anew.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.errors import InvalidSpecError, UnavailableError, Violation
from millrace.inference.launch_env import TYPED_FLAGS
from millrace.rpc.keep_alive import keep_alive
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_CONNECT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DEFAULT_PORT = 29501  # vLLM's for --master-port


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This node's place in its replica. `master` is (host, port) where the workers of all nodes meet."""

    rank: int
    count: int
    master: tuple[str, int]

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> "Node":
        """From vLLM's flags; InvalidSpecError if they contradict each other. Numbers may be text."""
        named = {TYPED_FLAGS.get(key) or key.rpartition(".")[2].replace("-", "_"): key for key in flags}
        violations: list[Violation] = []

        def number(name: str, default: int) -> int:
            value = flags.get(named.get(name, ""))
            text = str(default if value is None else value)
            if text.isdecimal():
                return int(text)
            violations.append(_wrong(named[name], text, "must be a whole number from 0 on"))
            return default

        rank, count, port = number("node_rank", 0), number("nnodes", 1), number("master_port", _DEFAULT_PORT)
        host = str(flags.get(named.get("master_addr", "")) or _LOOPBACK[0])
        if not violations and rank >= max(count, 1):
            violations.append(_wrong(named["node_rank"], str(rank), f"must be below nnodes, which is {count}"))
        if violations:
            raise InvalidSpecError(violations, reason="VLLM_FLAGS_INVALID", remedy="set nnodes and node_rank right")
        return cls(rank=rank, count=count, master=(host, port))

    @property
    def is_head(self) -> bool:
        """Whether it serves."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether it is all of its replica."""
        return self.count == 1

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the nodes meet on loopback."""
        return self.is_alone or self.master[0] in _LOOPBACK

    def require_model(self, model: str | None, store_url: str | None) -> None:
        """InvalidSpecError if a replica over several nodes lacks what each of them has to know from the start."""
        if self.is_alone:
            return
        given = {"MILLRACE_MODEL": model, "MILLRACE_STORE_URL": store_url}
        why = {
            "MILLRACE_MODEL": "is not set, and a replica over several nodes needs it: nodes that do not serve are not "
            "told which model the run's policy is",
            "MILLRACE_STORE_URL": "is not set: each node pulls policies by itself",
        }
        violations = [Violation(field=name, message=why[name]) for name, value in given.items() if not value]
        if violations:
            raise InvalidSpecError(violations, reason="SETTINGS_INVALID", remedy="set it on every node of the replica")

    async def until_head_ends(self) -> None:
        """Never return; UnavailableError when the workers' meeting point, which the head holds open, is closed.

        Workers that wait for the head's next step would not notice its end.
        """
        host, port = self.master
        with waits.waiting(f"the head of the replica at {host}:{port}", waits_on="inference"):
            while True:
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        reader, writer = await asyncio.open_connection(host, port)
                    break
                except (OSError, TimeoutError):
                    await asyncio.sleep(_RETRY_S)
        keep_alive(writer.get_extra_info("socket"))
        logger.info("the head of the replica is there", extra={"master": f"{host}:{port}"})
        try:
            await reader.read(1)  # it says nothing until its end
        except OSError as error:
            logger.warning("the connection to the head broke", extra={"error": str(error)})
        finally:
            writer.close()
        raise UnavailableError(
            f"the head of the replica at {host}:{port} has ended",
            reason="HEAD_GONE",
            remedy="start this node again with it, as a LeaderWorkerSet does",
        )


def _wrong(field: str, value: str, message: str) -> Violation:
    return Violation(field=field, value=value, message=message, source="vLLM's flags")
