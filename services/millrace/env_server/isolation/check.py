"""Whether this machine can make level `container`: tried once, as a worker would, before the env-server serves.

`python -m millrace.env_server.isolation.check CONFINEMENT DIRECTORY` is the process that tries.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from millrace.decoding import decode_object
from millrace.env_server.isolation.confinement import Confinement
from millrace.storage.clean_up import TemporaryDirectory

_TRY_S = 60.0
_SHOWN_CHARS = 300


def furnish(directory: Path, user: tuple[int, int] | None) -> None:
    """Make what `mounts.enter_root` needs in there; the worker's own part is the user's."""
    (directory / "root").mkdir()
    (directory / "tmp").mkdir(mode=0o700)
    if user is not None:
        os.chown(directory / "tmp", *user)
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    hosts.chmod(0o644)


def why_no_container(confinement: Confinement) -> str:
    """What keeps this machine from it; "" if nothing does (blocking, a second)."""
    with TemporaryDirectory(prefix="millrace-check-") as place:
        furnish(Path(place), confinement.user)
        command = [sys.executable, "-m", __name__, json.dumps(confinement.to_json()), place]
        try:
            answer = subprocess.run(command, capture_output=True, timeout=_TRY_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)[:_SHOWN_CHARS]
    if answer.returncode == 0:
        return ""
    said = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return said[:_SHOWN_CHARS] or f"the attempt ended with exit code {answer.returncode}"


def _try(confinement: Confinement, directory: str) -> None:
    """Become a worker, and import there what it imports."""
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    os.environ["HOME"] = os.environ["TMPDIR"] = "/tmp"
    confinement.enter(directory, control=control.detach())
    command = [sys.executable, "-c", "import millrace.env_server.workers.env_worker"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    try:
        _try(Confinement.from_json(decode_object(sys.argv[1], what="argument", reason="SETTINGS_INVALID")), sys.argv[2])
    except OSError as error:
        sys.exit(str(error.strerror or error))
