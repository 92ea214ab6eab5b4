"""A frozen teacher for `opd`: an engine of its own that serves a model of a workplace."""

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace_testing.workplaces import Workplace

MODELS = Path("outputs") / "reverse-text"
STARTS_WITHIN_S = 90.0


@contextlib.contextmanager
def serving(
    workplace: Workplace, directory: Path, *, model: str = "sft/model", name: str = "good", key: str = ""
) -> Iterator[str]:
    """Serve a model to every client that shows the key, if there is one; gives the API's base URL."""
    port, http_port = free_ports(2)
    env = {
        "MILLRACE_MODEL": str(workplace.path / MODELS / model),
        "MILLRACE_MODEL_NAME": name,
        "MILLRACE_LISTEN": f"127.0.0.1:{port}",
        "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{http_port}",
        "MILLRACE_DRAIN_S": "0",
    }
    if key:
        (directory / "key").write_text(key)
        (directory / "key").chmod(0o600)
        env["MILLRACE_WORKER_TOKEN_FILE"] = str(directory / "key")
    with (directory / "engine.log").open("w") as output:
        process = workplace.popen(
            *("-m", "millrace.inference.main"), stdout=output, preexec_fn=die_with_parent, env=env
        )
    url = f"http://127.0.0.1:{http_port}/v1"
    try:
        ends = time.monotonic() + STARTS_WITHIN_S
        while not _serves(url, key):
            assert process.poll() is None and time.monotonic() < ends, (directory / "engine.log").read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def flags(url: str, *, name: str = "good") -> list[str]:
    """Return what a run of `opd` is told of its teacher."""
    return [f"--orchestrator.algo.teacher.name={name}", f"--orchestrator.algo.teacher.base-url={url}"]


def _serves(url: str, key: str) -> bool:
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
        return urllib.request.urlopen(request, timeout=5).status == 200
    return False
