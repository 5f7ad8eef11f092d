"""The steps of the server. Each script answers with a word, and its values.

Every one may be repeated: a blob's id tells whether an entry is its own work, and the
counter in the root tells what began later. `EVAL` with the source, not its digest: the server
compiles it once, and forgets it when it restarts.
"""

from __future__ import annotations

from penstock_redis.lua import COMMON


def _script(source: str, flags: str = "") -> str:
    return f"#!lua{' flags=' + flags if flags else ''}\n{COMMON}{source}"


# Where a call stands among others: one that ended after this was answered began, or went on, later.
STAMP = _script(
    """
keep_root()
return call('HINCRBY', root, '~seq', 1)
""",
    "allow-oom",  # deleting begins with it
)

# group, name, id, chunk_bytes, token, the birth of the group that we know or ''
CREATE = _script("""
local group, name, blob, chunk, token, known = unpack(ARGV, 5)
keep_root()
local found = entry(group, name)
if found and found.blob ~= blob then return {'exists'} end
local born = open_group(group, token, known)
if not born then return {'restarted', group} end
if not found then set_entry(group, name, 'U', blob, 0, tonumber(chunk)) end
return {'ok', born}
""")

# group, name, id, top
GROW = _script("""
local group, name, blob, top = unpack(ARGV, 5)
local found = entry(group, name)
if not found or found.blob ~= blob or found.sealed then return {'gone'} end
if birth(group).run ~= this_run() then return {'restarted'} end
top = tonumber(top)
if top > found.size then
  if not room(top - found.size) then return {'full', string.format('%.0f', used())} end
  set_entry(group, name, 'U', blob, top, found.chunk)
end
keep_root()
touch(group)
return {'ok'}
""")

# group, name, id, length
SEAL = _script("""
local group, name, blob, length = unpack(ARGV, 5)
length = tonumber(length)
local found = entry(group, name)
if not found or found.blob ~= blob then return {'gone'} end
if found.sealed then return {found.size == length and 'ok' or 'gone'} end
if birth(group).run ~= this_run() then return {'restarted'} end
if not room(length - found.size) then return {'full', string.format('%.0f', used())} end
keep_root()
touch(group)
local need = chunks(length, found.chunk)
for number = need, chunks(found.size, found.chunk) - 1 do
  call('UNLINK', chunk_key(blob, number))
end
for number = 0, need - 1 do
  local key = chunk_key(blob, number)
  local want = math.min(found.chunk, length - number * found.chunk)
  -- Empty, but there: a chunk that is missing later was lost, and is no hole.
  if call('EXISTS', key) == 0 then
    call('SET', key, '')
    if ttl > 0 then call('PEXPIREAT', key, string.format('%.0f', now + ttl + 3 * margin)) end
  elseif call('STRLEN', key) > want then
    call('SET', key, call('GETRANGE', key, 0, want - 1), 'KEEPTTL')
  end
end
set_entry(group, name, 'S', blob, length, found.chunk)
return {'ok'}
""")

# group, name, id, token, the birth we know or '', stamp, exclusive, data, then pairs: named group,
# the birth of that
PUBLISH = _script("""
local group, name, blob, token, known, stamp, exclusive, data = unpack(ARGV, 5, 12)
local found = entry(group, name)
if found and found.blob == blob then return {'ok', birth(group).token} end
if found and exclusive == '1' then return {'exists'} end
if found and found.stamp > tonumber(stamp) then return {'ok', birth(group).token} end
local policy = evicting()
if policy then return {'evicts', policy} end
-- A record is useless without the groups that it names, so it is refused if these may be gone.
for i = 13, #ARGV, 2 do
  local born = birth(ARGV[i])
  if born then
    if ARGV[i + 1] ~= '' and born.token ~= ARGV[i + 1] then return {'expired', ARGV[i]} end
    if born.state == 'open' and born.run ~= this_run() then return {'restarted', ARGV[i]} end
  elseif ARGV[i + 1] ~= '' then
    return {'lost', ARGV[i]}
  end
end
if not room(#data - (found and found.size or 0)) then
  return {'full', string.format('%.0f', used())}
end
keep_root()
local born = open_group(group, token, known)
if not born then return {'restarted', group} end
local key = chunk_key(blob, 0)
call('SET', key, data)
if ttl > 0 then call('PEXPIREAT', key, string.format('%.0f', now + ttl + 3 * margin)) end
set_entry(group, name, 'S', blob, #data, math.max(1, #data))
if found then forget(found) end
-- Now the named groups outlive the record, even after a slow save.
local answer = {'ok', born}
local left = call('PTTL', group_key(group))
for i = 13, #ARGV, 2 do
  local other = birth(ARGV[i])
  if other then
    live(ARGV[i], left < 0 and 0 or left + margin)
    call('HSET', group_key(ARGV[i]), '~born', table.concat({other.token, other.run, 'named'}, ' '))
    answer[#answer + 1] = ARGV[i]
    answer[#answer + 1] = other.token
  end
end
return answer
""")

# group, name, stamp
DELETE = _script(
    """
local group, name, stamp = unpack(ARGV, 5)
local found = entry(group, name)
if found and found.stamp <= tonumber(stamp) then remove(group, name, found) end
return {'ok', tostring(call('EXISTS', group_key(group)))}
""",
    "allow-oom",
)

# group, name, id
ABORT = _script(
    """
local group, name, blob = unpack(ARGV, 5)
local found = entry(group, name)
if found and found.blob == blob and not found.sealed then remove(group, name, found) end
return {'ok'}
""",
    "allow-oom",
)

# group, name, limit_bytes
RECORD = _script(
    """
local group, name, most = unpack(ARGV, 5)
local found = entry(group, name)
if not found or not found.sealed then return {'missing'} end
if found.size > tonumber(most) then return {'large', string.format('%.0f', found.size)} end
local parts = {}
for number = 0, chunks(found.size, found.chunk) - 1 do
  local part = call('GET', chunk_key(found.blob, number))
  if not part then return {'lost'} end
  local want = math.min(found.chunk, found.size - number * found.chunk)
  parts[#parts + 1] = part .. string.rep('\\0', want - #part)
end
return {'ok', table.concat(parts)}
""",
    "no-writes",
)

USED = _script("return {'ok', string.format('%.0f', used())}\n", "no-writes")

# before_us
SWEEP = _script(
    """
local before = tonumber(ARGV[5])
local dead = base .. ':dead'
local all = call('HGETALL', dead)
for i = 1, #all, 2 do
  local word = words(all[i + 1])
  if tonumber(word[2]) < before then
    for number = 0, tonumber(word[1]) - 1 do call('UNLINK', chunk_key(all[i], number)) end
    call('HDEL', dead, all[i])
  end
end
for _, group in ipairs(call('HKEYS', root)) do
  if group ~= '~seq' and call('EXISTS', group_key(group)) == 0 then call('HDEL', root, group) end
end
return {'ok'}
""",
    "allow-oom",
)
