"""Token logs: each is what its event says."""

import re

from millrace.runlog.audit.findings import Audit
from millrace.runlog.audit.told import Told

_KEY = re.compile(r"token_logs/[0-9]{8,19}/[0-9]{4,10}(\.r[1-9][0-9]{0,3})?\.bin")


def check_token_logs(audit: Audit, told: Told) -> None:
    """Compare the trainer's log-probs with the events that tell of them: their size, in a deep audit their bytes."""
    for own, sayings in sorted(told.token_logs.items()):
        if not _KEY.fullmatch(own):
            audit.findings.violation("TOKEN_LOG_MISNAMED", f"an event names {own[:200]!r}, which is no token log")
            continue
        problems = [
            audit.object_problem(audit.names.root + own, size_bytes, sha256) for sha256, size_bytes in sorted(sayings)
        ]
        for problem in filter(None, problems):
            audit.object_violation("TOKEN_LOG", "log-probs of the trainer", problem)
    unsaid = [
        info.key
        for info in audit.store.list(f"{audit.names.root}token_logs/")
        if info.key.removeprefix(audit.names.root) not in told.token_logs
    ]
    if unsaid:
        audit.findings.not_seen(
            "TOKEN_LOGS",
            f"no event tells of {len(unsaid)} token logs, such as {audit.uri(unsaid[0])}: they were not compared",
        )
