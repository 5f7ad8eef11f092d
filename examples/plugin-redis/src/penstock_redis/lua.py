"""Functions of all scripts: entries, groups, and their expiry."""

from __future__ import annotations

COMMON = """
local root, base = KEYS[1], ARGV[1]
local ttl, margin, limit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local call = redis.call
local time = call('TIME')
local now_us = time[1] .. string.format('%06d', tonumber(time[2]))
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

-- A server that restarts may have lost confirmed data.
local function this_run()
  return string.match(call('INFO', 'server'), 'run_id:(%x+)')
end

-- A server that may drop single keys cannot hold checkpoints, which need all of their keys.
local function evicting()
  local policy = string.match(call('INFO', 'memory'), 'maxmemory_policy:([%a-]+)') or 'noeviction'
  local any = string.find(policy, '^allkeys')
  return (any or (ttl > 0 and string.find(policy, '^volatile'))) and policy or nil
end

local function group_key(group) return base .. ':group:' .. group end
local function chunk_key(blob, number)
  return base .. ':chunk:' .. blob .. ':' .. string.format('%d', number)
end

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do found[#found + 1] = word end
  return found
end

local function chunks(size, chunk) return math.ceil(size / chunk) end

local function parsed(text)
  local word = words(text)
  return {sealed = word[1] == 'S', blob = word[2], size = tonumber(word[3]),
          chunk = tonumber(word[4]), stamp = tonumber(word[6])}
end

local function entry(group, name)
  local text = call('HGET', group_key(group), name)
  return text and parsed(text) or nil
end

local function set_entry(group, name, state, blob, size, chunk)
  local stamp = call('HINCRBY', root, '~seq', 1)
  call('HSET', group_key(group), name,
       table.concat({state, blob, string.format('%.0f', size), string.format('%.0f', chunk),
                     now_us, stamp}, ' '))
end

local function birth(group)
  local text = call('HGET', group_key(group), '~born')
  if not text then return nil end
  local word = words(text)
  return {token = word[1], run = word[2], state = word[3]}
end

-- Never shortens a life; `life` 0 is for ever.
local function at_least(key, life)
  if life == 0 then call('PERSIST', key)
  else call('PEXPIREAT', key, string.format('%.0f', now + life), 'GT') end
end

local function longer(life, more) return life == 0 and 0 or life + more end

-- Chunks outlive their entries, so that no listed blob is half there.
local function live(group, life)
  local key = group_key(group)
  local left = call('PTTL', key)
  if left < 0 or (life > 0 and left >= life) then return end
  at_least(key, life)
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    if all[i] ~= '~born' then
      local found = parsed(all[i + 1])
      for number = 0, chunks(found.size, found.chunk) - 1 do
        at_least(chunk_key(found.blob, number), longer(life, margin))
      end
    end
  end
end

-- Not at each call: a group may have very many chunks.
local function touch(group)
  local left = call('PTTL', group_key(group))
  if left >= 0 and (ttl == 0 or left < ttl / 2) then live(group, ttl) end
end

local function keep_root()
  if call('EXISTS', root) == 0 then
    call('HSET', root, '~seq', 0)
    if ttl > 0 then
      call('PEXPIREAT', root, string.format('%.0f', now + ttl + 2 * margin))
    end
  else
    at_least(root, longer(ttl, 2 * margin))
  end
end

-- `known` is the birth that who calls relies on, or ''. What was put into a group before the server
-- was restarted may be gone: who relies on it is refused, who knows of nothing begins anew with it.
local function open_group(group, token, known)
  local key = group_key(group)
  local born = birth(group)
  local old = born and born.state == 'open' and born.run ~= this_run()
  if old and known ~= '' and string.find(group, '^data/') then return nil end
  if old or not born then
    call('HSET', key, '~born', table.concat({token, this_run(), 'open'}, ' '))
  end
  if born then
    touch(group)
  elseif ttl > 0 then
    call('PEXPIREAT', key, string.format('%.0f', now + ttl))
  end
  call('HSET', root, group, 1)
  return birth(group).token
end

local function used()
  local sum = 0
  for _, group in ipairs(call('HKEYS', root)) do
    if group ~= '~seq' then
      local all = call('HGETALL', group_key(group))
      for i = 1, #all, 2 do
        if all[i] ~= '~born' then sum = sum + parsed(all[i + 1]).size end
      end
    end
  end
  return sum
end

local function room(more) return limit == 0 or more <= 0 or used() + more <= limit end

local function forget(found)
  for number = 0, chunks(found.size, found.chunk) - 1 do
    call('UNLINK', chunk_key(found.blob, number))
  end
end

-- A write whose answer was lost may arrive after all, when nobody knows of its blob any more.
local function remove(group, name, found)
  call('HDEL', group_key(group), name)
  forget(found)
  if not found.sealed and ttl == 0 then
    call('HSET', base .. ':dead', found.blob,
         string.format('%.0f', chunks(found.size, found.chunk)) .. ' ' .. now_us)
  end
  if call('HLEN', group_key(group)) <= 1 then
    call('DEL', group_key(group))
    call('HDEL', root, group)
  end
end
"""
