"""Processes are started, forked and ended in one room, so that no kill leaves something behind."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "services" / "millrace"
WORDS = re.compile(
    r"create_subprocess_\w+|subprocess\.Popen\(|os\.fork\(|os\.killpg\(|PR_SET_PDEATHSIG|os\.pidfd_open\("
)
ALLOWED = {
    "local/redis.py": "a server that starts without an event loop, and dies with its parent",
    "env_server/isolation/namespaces.py": "the init of a worker's own namespaces, which starts and reaps inside them",
}


def found() -> dict[str, list[str]]:
    named = ((path.relative_to(ROOT).as_posix(), WORDS.findall(path.read_text())) for path in ROOT.rglob("*.py"))
    return {name: words for name, words in named if words}


def test_processes_are_started_and_ended_in_one_room() -> None:
    elsewhere = {name: words for name, words in found().items() if not name.startswith("processes/")}
    new = {name: words for name, words in elsewhere.items() if name not in ALLOWED}
    assert not new, f"{new}: use millrace.processes (sessions.start, forked.ForkServerClient, table.end_all)"
    assert elsewhere.keys() == ALLOWED.keys(), "an exemption that matches nothing"


def test_the_room_itself_is_seen() -> None:
    assert {"processes/sessions.py", "processes/fork_server.py"} <= found().keys()
