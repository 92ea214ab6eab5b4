"""Runs the service: the HTTP API in this process, the trainer and the sampler in two of its own."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import InvalidSpecError, Violation
from millrace.rpc.access import PUBLIC, ServerAccess
from millrace.rpc.http_server import HttpBounds, HttpServer
from millrace.storage import open_store
from millrace.storage.self_test import require_tested
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings, join_address, parse_address
from millrace.tinker.api import TinkerApi
from millrace.tinker.app import MAX_BODY_BYTES, AppSettings, TinkerApp
from millrace.tinker.workers import SNAPSHOT_VERBS, WorkerOrder, Workers

logger = logging.getLogger(__name__)

DEFAULT_LISTEN = "127.0.0.1:8090"
BOUNDS = HttpBounds(
    connections=4096, request_s=10.0, idle_s=75.0, message_bytes=MAX_BODY_BYTES + (1 << 20), shutdown_s=2.0
)
_FIELD = "--listen"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What a server is started with."""

    model: Path
    """Directory of the base model."""
    names: tuple[str, ...]
    """Names of the base model that clients may ask for; empty: its path as it was given."""
    listen: str = DEFAULT_LISTEN
    max_tokens: int | None = None
    """Longest sequence; None: the model's."""
    num_threads: int = 1
    snapshot_verbs: int = SNAPSHOT_VERBS
    hold_s: float | None = None
    """How long polls are held; None: the usual time."""


async def serve(
    options: ServiceOptions, environ: Mapping[str, str], *, on_start: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGTERM or SIGINT; `on_start` gets the URL once the server listens.

    Raises InvalidSpecError for wrong settings, and what the object store's test raises.
    """
    settings = Settings.from_env(environ, required=["store_url"])
    setup("tinker", level=settings.log_level, json_lines=settings.log_json)
    if not (options.model / "config.json").is_file():
        message = "must be the directory of a model, with its config.json"
        raise InvalidSpecError([Violation(field="--model", value=str(options.model), message=message)])
    access = ServerAccess.of(settings)
    access.require_safe(options.listen, {PUBLIC}, field=_FIELD)
    store = open_store(settings.require("store_url"))
    tested = await asyncio.to_thread(require_tested, store, prefix=settings.prefix)
    order = WorkerOrder(
        model=str(options.model.resolve()),
        max_tokens=options.max_tokens,
        num_threads=options.num_threads,
        snapshot_verbs=options.snapshot_verbs,
    )
    workers = Workers(order, store=store, prefix=settings.prefix)
    api = TinkerApi(store, prefix=settings.prefix, base_names=options.names or (str(options.model),))
    bounds = AppSettings() if options.hold_s is None else AppSettings(hold_s=options.hold_s)
    app = TinkerApp(api, workers, access=access, settings=bounds)
    host, port = parse_address(options.listen)
    server = await HttpServer.start(app.make_app(), host, port, tls=access.tls, bounds=BOUNDS, field=_FIELD)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    workers.start()
    try:
        await asyncio.wrap_future(tested)
        scheme = "http" if access.tls is None else "https"
        address = join_address(host, server.port)
        logger.info("serving", extra={"address": address, "models": ", ".join(api.base_names)})
        on_start(f"{scheme}://{address}")
        await stopping.wait()
    finally:
        await server.stop()
        await workers.stop()
