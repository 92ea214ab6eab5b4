"""What a replica registers as, whichever process of it answers."""

from collections.abc import Callable

from millrace.inference.http.access import http_scheme
from millrace.internal.v1.worker_service_pb2 import WORKER_KIND_INFERENCE, Worker
from millrace.rpc.reach import is_wildcard
from millrace.runlog.redis.log import FORMAT_MAJOR
from millrace.telemetry.settings import join_address


def inference_worker(worker_id: str) -> Worker:
    """What a replica registers as, but for where it is."""
    return Worker(
        worker_id=worker_id,
        kind=WORKER_KIND_INFERENCE,
        min_log_format=FORMAT_MAJOR,
        max_log_format=FORMAT_MAJOR,
    )


def http_address(host: str, port: int) -> Callable[[str], str]:
    """Make the URL of an HTTP API that listens on `host`: of that host, or of the reachable one for a wildcard."""
    return lambda reachable: f"{http_scheme()}://{join_address(reachable if is_wildcard(host) else host, port)}/v1"
