"""Where the token logs of a run lie: one object per step and lineage, created once, kept as long as the run.

They are measurements: nothing is made of them, so no header and no seal names them, and a fork begins without those of
its parent.
"""

import re

from millrace.rollouts.token_log import MAX_TOKEN_LOG_BYTES, TokenLog, decode_token_log, encode_token_log
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore
from millrace.storage.commit_points import find_newest, next_revision

_LOG = re.compile(r"([0-9]{4,9})(?:\.r([1-9][0-9]{0,3}))?\.bin")


def store_token_log(store: ObjectStore, names: Names, log: TokenLog) -> bool:
    """Keep the log of a step (blocking); False if one with other bytes is there, behind which it is now the next one.

    A step that is trained again gives equal bytes where the run is strict, and writes nothing then.
    """
    key, data = names.token_log(log.step, log.lineage), encode_token_log(log)
    if store.create(key, data):
        return True
    if store.get(find_newest(store, key) or key) == data:
        return True
    store.create(next_revision(store, key), data)
    return False


def find_token_log(store: ObjectStore, names: Names, step: int) -> str | None:
    """The key of a step's log: of its newest lineage, which is the one that the run went on with; None without any."""
    prefix = names.token_logs(step)
    found = ((_LOG.fullmatch(info.key.removeprefix(prefix)), info.key) for info in store.list(prefix))
    numbered = [(int(match[1]), int(match[2] or 0), key) for match, key in found if match]
    return max(numbered, default=(0, 0, None))[2]


def load_token_log(store: ObjectStore, key: str) -> TokenLog:
    """The log with this key; NotFoundError, or CorruptObjectError if it is damaged."""
    return decode_token_log(store.get(key, max_bytes=MAX_TOKEN_LOG_BYTES), where=key)
