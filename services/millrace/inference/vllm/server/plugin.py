"""vLLM's endpoint plugin `millrace`: makes an OpenAI server of vLLM a replica of Millrace, in the server's own process.

`init_state` puts the gate before every serving object and starts the parts that every replica has (PolicyService,
health, registration, the updater) in the server's event loop. A SIGTERM drains them first; then vLLM ends.
"""

import asyncio
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from millrace.errors import MillraceError
from millrace.inference import updater
from millrace.inference.model_files import ModelSlot
from millrace.inference.service import ReplicaParts
from millrace.inference.settings import InferenceSettings, http_address
from millrace.inference.vllm.engine import VllmEngine
from millrace.inference.vllm.gate import GatedClient, GenerationGate
from millrace.inference.vllm.handover import OWNED_DIRECTORY_VARIABLE, WORKER_ID_VARIABLE, take_over
from millrace.inference.vllm.server import parsers
from millrace.inference.vllm.server.routes import VllmReplica, attach
from millrace.storage.clean_up import TemporaryDirectory
from millrace.storage.scratch import scratch_parent
from millrace.telemetry import metrics
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings

logger = logging.getLogger(__name__)

_SERVER_POLL_S = 0.05


class MillracePlugin:
    """See vLLM's `EndpointPlugin`."""

    name = "millrace"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Put our routes in place of vLLM's that generate, in the application `app`, and add those of PRIME-RL."""
        attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the replica in vLLM's server: the gate before every serving object, a fixed model, registration.

        `state` is the application's, `args` are the server's arguments. An error ends the server.
        """
        parsers.install()  # before vLLM makes the objects that serve, which ask for their parsers once
        settings = Settings.from_env(os.environ, required=["listen"])
        own = InferenceSettings.from_env(os.environ)
        setup("inference", level=settings.log_level, json_lines=settings.log_json)
        owner = _own_directory(os.environ)
        directory = Path(owner if isinstance(owner, str) else owner.name)
        gate = GenerationGate()
        engine = VllmEngine(engine_client, gate, directory=directory, is_fixed=own.vllm_model is not None)
        _put_before(state, engine_client, GatedClient(engine_client, gate))
        stopping = asyncio.Event()
        slot = ModelSlot()
        parts = ReplicaParts(
            settings,
            engine,
            slot,
            stopping=stopping,
            extra_names=() if own.model_name is None else (own.model_name,),
            policy_dir=directory,
            worker_id=os.environ.get(WORKER_ID_VARIABLE),
        )
        if own.vllm_model is not None:
            await parts.updater.serve_fixed(Path(args.model))
        for collector in (metrics.common("inference"), *updater.collectors(engine.status)):
            REGISTRY.register(collector)  # vLLM's `GET /metrics` shows them beside its own
        replica = VllmReplica(engine=engine, gate=gate, slot=slot, updater=parts.updater, owner=owner)
        state.millrace = replica
        url = http_address(args.host or "0.0.0.0", args.port)
        # From here on the launcher's front does not answer any more: the fixed model is served before.
        await take_over()
        replica.tasks.append(asyncio.create_task(_run(parts, replica, url, stopping, state), name="millrace replica"))
        replica.tasks.append(asyncio.create_task(_take_signal(state, stopping), name="millrace signals"))


def _own_directory(environ: Mapping[str, str]) -> str | TemporaryDirectory:
    """Return the directory that the launcher made and deletes, or a new one, deleted with the returned object."""
    if given := environ.get(OWNED_DIRECTORY_VARIABLE):
        return given
    return TemporaryDirectory(prefix="millrace-policy-", directory=scratch_parent())


async def _run(parts: ReplicaParts, replica: VllmReplica, url: Any, stopping: asyncio.Event, state: Any) -> None:
    """Run the replica from start to drain; then, however it ended, have vLLM's server end.

    `url` makes the registered URL from a host.
    """
    try:
        await parts.run(url, drain=replica.drain, handle_signals=False)
    except MillraceError as error:
        logger.critical("the replica cannot go on", extra={"error": str(error)})
    except Exception:  # the edge of the process: without its replica the server is of no use
        logger.critical("the replica died", exc_info=True)
    finally:
        await replica.engine.close()
        stopping.set()
        # unregistered wait: until vLLM has made its server object, moments after the plugin's start
        while (server := getattr(state, "server", None)) is None:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_SERVER_POLL_S)
        server.should_exit = True


async def _take_signal(state: Any, stopping: asyncio.Event) -> None:
    """Wait until vLLM has set its own signal handlers, then have SIGTERM and SIGINT set `stopping` instead.

    The replica must drain before vLLM ends.
    """
    # unregistered wait: until vLLM's server has started; the launcher registers that wait
    while not getattr(getattr(state, "server", None), "started", False):  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(_SERVER_POLL_S)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


def _put_before(state: Any, client: Any, gated: GatedClient) -> None:
    """Replace the engine client by the gated one in every serving object of the application's state."""
    # Starlette's `State` keeps its attributes in `_state`.
    for item in vars(state)["_state"].values():
        if getattr(item, "engine_client", None) is client:
            item.engine_client = gated
