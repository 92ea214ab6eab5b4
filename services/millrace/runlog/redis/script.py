"""The Lua scripts of the log. A script is atomic but never rolled back: each checks everything before its first write.

Sent by EVALSHA, by EVAL when the server does not know it (restart, wipe, failover); FUNCTION is avoided because its
library would be one more thing to lose.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import NoScriptError


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its SHA-1, by which Redis caches it."""

    source: str
    sha1: str

    @staticmethod
    def of(source: str) -> "Script":
        """Make a script from its Lua source."""
        return Script(source, hashlib.sha1(source.encode()).hexdigest())

    async def run(self, client: redis_asyncio.Redis, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script on Redis with these keys and arguments, and return its answer.

        Errors of the connection are not handled here: the caller does so (`connection.call`).
        """
        try:
            # unregistered wait: what runs a script hands it to `connection.call`
            return await client.execute_command("EVALSHA", self.sha1, len(keys), *keys, *args)
        except NoScriptError:
            # NOSCRIPT is answered before anything runs, so this does not run the script a second time.
            # unregistered wait: what runs a script hands it to `connection.call`
            return await client.execute_command("EVAL", self.source, len(keys), *keys, *args)


# The one append script.
# KEYS: stream, meta.
# ARGV: mode, generation, role, epoch, position, count, then per entry v, h, d, tp.
#   mode "auto"   ids by Redis; role "" (nobody is fenced out of reporting what it finished)
#   mode "step"   ids <position>-1 .. <position>-<count>; position must be last + 1, or base:{stream} of meta if the
#                 stream is new; the last step is known from last-generated-id, which trimming does not change
#   mode "writer" ids <generation>-*; role is the writer's name, position its sequence number, last + 1 in seq:{writer}
#                 of meta or 1: a repeated append of the newest entry is known by its hash
# EPOCH_BEHIND and not FENCED where meta has an older epoch than the writer, or none: Redis came back without the write
# of RAISE_EPOCH. Only the store can tell whether the writer's epoch is still the newest, so the caller asks it. A step
# that is there is ALREADY if its first entry has the hash of ours. That is enough: the first entry of a batch is its
# header, which names the chunks by their sha256, and a policy has one entry. Numbers of Lua are doubles, and `..`
# writes large ones with an exponent; `string.format('%.0f')` writes all digits.
# Answer: {code, detail}; ids of the detail are for messages only. DAMAGED: a field of meta or the newest id of the
# stream is not ours, the detail says what.
APPEND = Script.of(
    """
local stream, meta = KEYS[1], KEYS[2]
local mode, generation, role, epoch = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local position, count = ARGV[5], tonumber(ARGV[6])
local first_hash = ARGV[8]

-- Another generation, or one that was marked as damaged, takes no entry.
local stored = redis.call('HGET', meta, 'generation')
if stored ~= generation then
  return {'LOGGONE', stored or 'no meta'}
end

local ids = {}
local writer_field = nil
if mode == 'step' then
  local held = redis.call('HGET', meta, 'epoch:' .. role)
  if held and not string.match(held, '^%d+$') then return {'DAMAGED', 'field epoch:' .. role .. ' of meta'} end
  if (not held) or tonumber(held) < tonumber(epoch) then
    return {'EPOCH_BEHIND', held or ''}
  elseif tonumber(held) > tonumber(epoch) then
    return {'FENCED', held}
  end
  local step = tonumber(position)
  local expected
  -- last-generated-id stays when entries are trimmed: also an empty stream says which step is next.
  if redis.call('EXISTS', stream) == 1 then
    local info = redis.call('XINFO', 'STREAM', stream)
    local last = nil
    for i = 1, #info, 2 do
      if info[i] == 'last-generated-id' then last = info[i + 1] end
    end
    expected = tonumber(string.match(last, '^(%d+)%-')) + 1
  else
    local field = 'base:' .. ARGV[7 + 4 * count]
    expected = tonumber(redis.call('HGET', meta, field) or '0')
    if not expected then return {'DAMAGED', 'field ' .. field .. ' of meta'} end
  end
  -- A repeated append is known by its first entry; once that is trimmed, only the store can tell.
  if step < expected then
    local found = redis.call('XRANGE', stream, position .. '-1', position .. '-1')
    if #found == 0 then return {'CONFLICT', 'trimmed'} end
    local fields = found[1][2]
    for i = 1, #fields, 2 do
      if fields[i] == 'h' and fields[i + 1] == first_hash then return {'ALREADY', found[1][1]} end
    end
    return {'CONFLICT', 'other content'}
  elseif step > expected then
    return {'CONFLICT', 'expected ' .. string.format('%.0f', expected)}
  end
  for i = 1, count do ids[i] = position .. '-' .. i end
elseif mode == 'writer' then
  writer_field = 'seq:' .. role
  local last = redis.call('HGET', meta, writer_field)
  if last then
    local number, hash = string.match(last, '^(%d+) (%x+)$')
    if not number then return {'DAMAGED', 'field ' .. writer_field .. ' of meta'} end
    -- A writer sends one event at a time, so only its newest can be a repetition.
    if number == position and hash == first_hash then return {'ALREADY', number} end
    if tonumber(position) ~= tonumber(number) + 1 then return {'CONFLICT', 'sequence ' .. number} end
  elseif position ~= '1' then
    return {'CONFLICT', 'sequence 0'}
  end
  ids[1] = generation .. '-*'
elseif mode == 'auto' then
  for i = 1, count do ids[i] = '*' end
else
  return redis.error_reply('ERR unknown append mode ' .. mode)
end

-- From here on something is written. `pcall`, because an id that is refused is an answer and no error.
local id
for i = 1, count do
  local at = 7 + (i - 1) * 4
  id = redis.pcall('XADD', stream, ids[i], 'v', ARGV[at], 'h', ARGV[at + 1], 'd', ARGV[at + 2], 'tp', ARGV[at + 3])
  if type(id) == 'table' and id.err then
    if string.find(id.err, 'equal or smaller') or string.find(id.err, 'exhausted') then
      return {'DAMAGED', 'its newest id is so high that none of ours can follow'}
    end
    return id
  end
end
if writer_field then
  redis.call('HSET', meta, writer_field, position .. ' ' .. first_hash)
end
return {'OK', id}
"""
)

# Raise epoch:{role} of meta to ours, never lower it. KEYS: meta. ARGV: generation, role, epoch.
RAISE_EPOCH = Script.of(
    """
local stored = redis.call('HGET', KEYS[1], 'generation')
if stored ~= ARGV[1] then return {'LOGGONE', stored or 'no meta'} end
local field = 'epoch:' .. ARGV[2]
local held = redis.call('HGET', KEYS[1], field)
if held and not string.match(held, '^%d+$') then return {'DAMAGED', 'field ' .. field .. ' of meta'} end
if held and tonumber(held) > tonumber(ARGV[3]) then return {'FENCED', held} end
redis.call('HSET', KEYS[1], field, ARGV[3])
return {'OK', ARGV[3]}
"""
)

# Create meta if there is none. KEYS: meta. ARGV: generation, then field, value, ...
CREATE_META = Script.of(
    """
local stored = redis.call('HGET', KEYS[1], 'generation')
if stored then
  return {stored == ARGV[1] and 'ALREADY' or 'CONFLICT', stored}
end
redis.call('HSET', KEYS[1], 'generation', ARGV[1], unpack(ARGV, 2))
return {'OK', ARGV[1]}
"""
)

# What meta says its generation is; "" if there is none. KEYS: meta.
HELD = Script.of(
    """
if redis.call('TYPE', KEYS[1])['ok'] ~= 'hash' then return '' end
return redis.call('HGET', KEYS[1], 'generation') or ''
"""
)

# Give a damaged copy up: its generation becomes none that anybody holds, so that nothing is appended to it or read from
# it any more, and the next look rebuilds it. KEYS: meta. ARGV: generation, what is damaged, in words.
CONDEMN = Script.of(
    """
if redis.call('TYPE', KEYS[1])['ok'] ~= 'hash' then return {'LOGGONE', 'no meta'} end
local stored = redis.call('HGET', KEYS[1], 'generation')
if stored ~= ARGV[1] then return {'LOGGONE', stored or 'no meta'} end
redis.call('HSET', KEYS[1], 'generation', 'damaged ' .. ARGV[1], 'damage', ARGV[2])
return {'OK', ''}
"""
)

# Install a rebuilt log where there is none, or in place of the stale generation that the rebuilder saw.
# KEYS: meta, events, rebuilt events, batches, policies, rollouts. ARGV: generation, stale generation or "", number of
# rebuilt events, after how many ms all of it expires (0: never), then field, value, ... of meta. Batches and policies
# are dropped: their writers append them again from the store, from base:{stream} on. Rollouts stay: what Redis has of
# them nobody else may have. Only where no rollout could be appended any more (the key is no stream, or its newest id is
# above what a clock says, 10^15 ms) they are moved into a new stream, without the entries that have such ids.
INSTALL_LOG = Script.of(
    """
local meta, events, rebuilt, rollouts = KEYS[1], KEYS[2], KEYS[3], KEYS[6]
-- meta may be of another type, of which HGET would be an error.
local stored = redis.call('TYPE', meta)['ok'] == 'hash' and redis.call('HGET', meta, 'generation')
if stored and stored ~= ARGV[2] then return {'HELD', stored} end
-- The rebuilt events expire, and may be gone when their rebuilder was slow.
if redis.call('XLEN', rebuilt) ~= tonumber(ARGV[3]) then return {'INCOMPLETE', ''} end
local kind = redis.call('TYPE', rollouts)['ok']
if kind == 'stream' then
  local info = redis.call('XINFO', 'STREAM', rollouts)
  local last = ''
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
  if tonumber(string.match(last, '^(%d+)%-')) >= 1e15 then
    -- In pages, because `unpack` and a reply of the whole stream take memory; an entry of ours has 8 texts.
    local moved, after = rollouts .. ':moved', '-'
    redis.call('DEL', moved)
    while after do
      local page = redis.call('XRANGE', rollouts, after, '999999999999999', 'COUNT', 64)
      after = nil
      for _, entry in ipairs(page) do
        if #entry[2] <= 64 then redis.call('XADD', moved, entry[1], unpack(entry[2])) end
        after = '(' .. entry[1]
      end
    end
    redis.call('DEL', rollouts)
    if redis.call('EXISTS', moved) == 1 then redis.call('RENAME', moved, rollouts) end
  end
elseif kind ~= 'none' then
  redis.call('DEL', rollouts)
end
redis.call('DEL', meta, KEYS[4], KEYS[5])
redis.call('RENAME', rebuilt, events)
redis.call('HSET', meta, 'generation', ARGV[1])
for i = 5, #ARGV, 2 do redis.call('HSET', meta, ARGV[i], ARGV[i + 1]) end
for _, key in ipairs({meta, events, rollouts}) do
  if ARGV[4] == '0' then redis.call('PERSIST', key) else redis.call('PEXPIRE', key, ARGV[4]) end
end
return {'OK', ARGV[1]}
"""
)

# Lua: what a lease says, within a bound; of what cannot be one, words that no lease says.
_HELD = """
local function read(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return false end
  if kind ~= 'string' then return 'no string: ' .. kind end
  if redis.call('STRLEN', key) > 65536 then return 'too long: ' .. redis.call('STRLEN', key) .. ' bytes' end
  return redis.call('GET', key)
end
"""

# Take a lease that is free, or that has the value we expect there (of a holder whose place we took).
# KEYS: lease, meta. ARGV: generation, value, ttl in ms, expected value or "".
ACQUIRE_LEASE = Script.of(
    _HELD
    + """
local stored = redis.call('HGET', KEYS[2], 'generation')
if stored ~= ARGV[1] then return {'LOGGONE', stored or 'no meta'} end
local held = read(KEYS[1])
if held and held ~= ARGV[4] then return {'HELD', held} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {'OK', ''}
"""
)

# Lua: whether a lease's value is of our token. A value that a restarted Redis brought back is older, but ours.
_IS_OURS = """
local function is_ours(held, token)
  local decoded, body = pcall(cjson.decode, held)
  return decoded and type(body) == 'table' and body['token'] == token
end
"""

# Renew our lease, change what it says, or take it again where Redis lost it, or where it holds what we expect.
# KEYS: lease. ARGV: token, value, ttl in ms, expected value or "".
RENEW_LEASE = Script.of(
    _HELD
    + _IS_OURS
    + """
local held = read(KEYS[1])
if held and held ~= ARGV[4] and not is_ours(held, ARGV[1]) then return {'LOST', held} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {'OK', ''}
"""
)

# Let a value that is no lease expire as one would. KEYS: lease. ARGV: that value, ttl in ms. Answer: 1 if it now does.
EXPIRE_LEASE = Script.of(
    _HELD
    + """
local left = redis.call('PTTL', KEYS[1])
if read(KEYS[1]) == ARGV[1] and (left < 0 or left > tonumber(ARGV[2])) then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
)

# Give our lease back. KEYS: lease, its end. ARGV: token, last words and for how many ms to keep them ("": none).
RELEASE_LEASE = Script.of(
    _HELD
    + _IS_OURS
    + """
local held = read(KEYS[1])
if held and is_ours(held, ARGV[1]) then
  if ARGV[2] ~= '' then redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
  return redis.call('DEL', KEYS[1])
end
return 0
"""
)
