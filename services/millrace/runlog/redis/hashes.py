"""Which entries a stream holds, by the sha256 of their bytes: only ids and hashes cross the network."""

from collections.abc import Mapping

from millrace.runlog.names import Stream
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.log import RunLog, log_gone
from millrace.runlog.redis.script import Script

PAGE_ENTRIES = 128
"""Entries that one call of the script looks at: at 0.1 MiB each the server reads 13 MiB, some milliseconds."""

# The fields h of a page of a stream. KEYS: stream, meta. ARGV: generation, id behind which to begin, count.
READ_HASHES = Script.of(
    """
local stored = redis.call('HGET', KEYS[2], 'generation')
if stored ~= ARGV[1] then return {'LOGGONE', stored or 'no meta', {}} end
local entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', ARGV[3])
local hashes, last = {}, ''
for i, entry in ipairs(entries) do
  last = entry[1]
  for j = 1, #entry[2], 2 do
    if entry[2][j] == 'h' then hashes[#hashes + 1] = entry[2][j + 1] end
  end
end
if last == '18446744073709551615-18446744073709551615' then last = '' end  -- nothing can be read behind it
return {'OK', last, hashes}
"""
)


async def read_hashes(log: RunLog, stream: Stream) -> Mapping[str, int]:
    """How often each sha256 (hex) is in a stream; `LogGoneError` if this generation of the log is gone."""
    keys, after = [log.names.stream(stream), log.names.meta], "0-0"
    counts: dict[str, int] = {}
    while after:
        args = [log.generation, after, PAGE_ENTRIES]
        answer, last, hashes = await log.call(
            f"reading the hashes of {stream}", lambda args=args: READ_HASHES.run(log.redis, keys, args)
        )
        if as_text(answer) == "LOGGONE":
            raise log_gone(f"run {log.uid}: generation {log.generation}, Redis has {as_text(last)}")
        for value in hashes:
            counts[as_text(value)] = counts.get(as_text(value), 0) + 1
        after = as_text(last)
    return counts
