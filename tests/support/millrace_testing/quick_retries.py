"""Calls of a server that is not there are tried as often as ever, and at once: else each takes a second and a half."""

import contextlib
import json
from collections.abc import Iterator

from millrace.rpc.channel import CHANNEL_OPTIONS

_KEY = "grpc.service_config"


@contextlib.contextmanager
def quick_retries() -> Iterator[None]:
    """Let channels that are opened within this block wait for 10 ms before gRPC's first retry, not for 100 ms."""
    [(place, text)] = [(place, value) for place, (key, value) in enumerate(CHANNEL_OPTIONS) if key == _KEY]
    config = json.loads(text)
    config["methodConfig"][0]["retryPolicy"]["initialBackoff"] = "0.01s"
    CHANNEL_OPTIONS[place] = (_KEY, json.dumps(config))
    try:
        yield
    finally:
        CHANNEL_OPTIONS[place] = (_KEY, text)
