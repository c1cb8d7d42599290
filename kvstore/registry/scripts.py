"""The Lua scripts that change membership. Each one checks what it replaces, and each change bumps the epoch in the same step.

Five keys, all in one hash slot: `members` (node id -> record that no script reads), `states` (node id ->
"boot:state:since_ms:takeover_permille"), `leases` (node id -> end in ms of the server's clock), `meta` (epoch, swept_at, calm_until), `hot`
(stripe id -> "extra_replicas:end_ms").
All times are those of the Redis server, so no clock of a member counts.
"""

from __future__ import annotations

EPOCH_LEAP = 1024
"""How far the epoch jumps when Redis comes back with less than a member knew: further than any two members' views are apart."""

_PRELUDE = """
local MEMBERS, STATES, LEASES, META, HOT, CHANNEL = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[1]
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function number(value) return string.format('%.0f', value) end
local function epoch() return tonumber(redis.call('HGET', META, 'epoch') or '0') end
local function bump()
  local bumped = redis.call('HINCRBY', META, 'epoch', 1)
  redis.call('PUBLISH', CHANNEL, bumped)
  return bumped
end
local function read(node)
  local text = redis.call('HGET', STATES, node)
  if not text then return nil end
  return string.match(text, '^(%x+):(%l+):(%d+):(%d+)$')
end
local function write(node, boot, state, at, takeover)
  redis.call('HSET', STATES, node, boot .. ':' .. state .. ':' .. number(at) .. ':' .. takeover)
end
"""

# Write the record and a lease. A process that starts takes its node id over from whoever had it; one that comes back (after it was
# declared dead, or after Redis lost it) must not take it from a successor. A restart that nobody noticed keeps the stripes it had.
JOIN = (
    _PRELUDE
    + """
local node, boot, record, state, ttl, comes_back = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7] == '1'
local takeover = ARGV[8]
local held_by, held_state, _, held_takeover = read(node)
if comes_back and held_by and held_by ~= boot then return {'superseded', epoch()} end
if not comes_back and (held_state == 'active' or held_state == 'suspect') then takeover = held_takeover end
local t = now()
redis.call('HSET', MEMBERS, node, record)
redis.call('HSET', LEASES, node, number(t + ttl))
write(node, boot, state, t, takeover)
return {'joined', bump(), takeover}
"""
)

# Extend the lease of exactly this start of the node, and tell what it is held for. A suspect that renews is active again.
RENEW = (
    _PRELUDE
    + """
local node, boot, ttl = ARGV[2], ARGV[3], tonumber(ARGV[4])
local held_by, state, _, takeover = read(node)
if not held_by then
  if redis.call('HLEN', STATES) == 0 then return {'emptied', epoch()} end
  return {'absent', epoch()}
end
if held_by ~= boot then return {'superseded', epoch()} end
if state == 'dead' or state == 'left' then return {'removed', epoch()} end
local t = now()
redis.call('HSET', LEASES, node, number(t + ttl))
if state == 'suspect' then
  write(node, boot, 'active', t, takeover)
  return {'renewed', bump(), 'active', takeover}
end
return {'renewed', epoch(), state, takeover}
"""
)

# Compare and set by boot id and state.
CHANGE = (
    _PRELUDE
    + """
local node, boot, from, to = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local held_by, state, _, takeover = read(node)
if held_by ~= boot or state ~= from then return {'refused', epoch(), (held_by == boot) and state or 'another boot'} end
write(node, boot, to, now(), takeover)
if to == 'left' or to == 'dead' then redis.call('HDEL', LEASES, node) end
return {'changed', bump()}
"""
)

# The next step of a newcomer, compared with the one before it.
TAKE_OVER = (
    _PRELUDE
    + """
local node, boot, from, to = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local held_by, state, since, takeover = read(node)
if held_by ~= boot or takeover ~= from or (state ~= 'active' and state ~= 'suspect') then return {'refused', epoch()} end
write(node, boot, state, since, to)
return {'changed', bump()}
"""
)

# Stripes that an owner finds hot, for `ttl` from now on. A stripe keeps the most that anybody asked for; new ones are let in up to `most`.
ANNOUNCE_HOT = (
    _PRELUDE
    + """
local node, boot, ttl, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local held_by, state = read(node)
if held_by ~= boot or (state ~= 'active' and state ~= 'suspect') then return {'refused', epoch()} end
local ends = number(now() + ttl)
local changed = false
for i = 6, #ARGV, 2 do
  local stripe, extra = ARGV[i], tonumber(ARGV[i + 1])
  local known = redis.call('HGET', HOT, stripe)
  local before = known and tonumber(string.match(known, '^(%d+):')) or -1
  if known or redis.call('HLEN', HOT) < most then
    redis.call('HSET', HOT, stripe, number(math.max(before, extra)) .. ':' .. ends)
    changed = changed or extra > before
  end
end
if changed then bump() end
return {'announced', epoch()}
"""
)

# Suspect whose lease is over, bury who stayed suspect. Members sweep all the time, so a long gap between two sweeps means that
# Redis or everybody was away: then leases ran out without meaning anything, and all get one lease's time to renew.
SWEEP = (
    _PRELUDE
    + """
local dead_after, gap, calm, forget_after = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local t = now()
local swept_at = tonumber(redis.call('HGET', META, 'swept_at') or '0')
redis.call('HSET', META, 'swept_at', number(t))
if t - swept_at > gap then
  redis.call('HSET', META, 'calm_until', number(t + calm))
  return {'calm', epoch()}
end
if t < tonumber(redis.call('HGET', META, 'calm_until') or '0') then return {'calm', epoch()} end
local changed = false
local hot = redis.call('HGETALL', HOT)
for i = 1, #hot, 2 do
  if tonumber(string.match(hot[i + 1], ':(%d+)$')) < t then
    redis.call('HDEL', HOT, hot[i])
    changed = true
  end
end
local states = redis.call('HGETALL', STATES)
for i = 1, #states, 2 do
  local node = states[i]
  local boot, state, since, takeover = string.match(states[i + 1], '^(%x+):(%l+):(%d+):(%d+)$')
  local expired = tonumber(redis.call('HGET', LEASES, node) or '0') < t
  if not state then
    -- Another version's: not ours to judge, and no reason for everybody's sweep to fail.
  elseif state == 'dead' or state == 'left' then
    if t - tonumber(since) >= forget_after then
      redis.call('HDEL', MEMBERS, node)
      redis.call('HDEL', STATES, node)
      redis.call('HDEL', LEASES, node)
      changed = true
    end
  elseif expired and state == 'active' then
    write(node, boot, 'suspect', t, takeover)
    changed = true
  elseif expired and (state ~= 'suspect' or t - tonumber(since) >= dead_after) then
    write(node, boot, 'dead', t, takeover)
    redis.call('HDEL', LEASES, node)
    changed = true
  end
end
if changed then bump() end
return {'swept', epoch()}
"""
)

# Redis lost everything: write back the last view a member knows, all of it at once, so that no view in between has few members.
RESTORE = (
    _PRELUDE
    + """
local known, leap, ttl = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('HLEN', STATES) > 0 then return {'present', epoch()} end
local t = now()
for i = 5, #ARGV, 5 do
  redis.call('HSET', MEMBERS, ARGV[i], ARGV[i + 4])
  redis.call('HSET', LEASES, ARGV[i], number(t + ttl))
  write(ARGV[i], ARGV[i + 1], ARGV[i + 2], t, ARGV[i + 3])
end
redis.call('HSET', META, 'epoch', number(math.max(known, epoch()) + leap))
redis.call('HSET', META, 'swept_at', number(t))
redis.call('HSET', META, 'calm_until', number(t + ttl))
return {'restored', bump()}
"""
)

# The view, when it is newer than `known`. A Redis that came back with an older epoch is lifted above what its readers know.
VIEW = (
    _PRELUDE
    + """
local known, leap = tonumber(ARGV[2]), tonumber(ARGV[3])
if known > epoch() and redis.call('HLEN', STATES) > 0 then
  redis.call('HSET', META, 'epoch', number(known + leap))
  bump()
end
if epoch() <= known then return {epoch()} end
return {epoch(), redis.call('HGETALL', MEMBERS), redis.call('HGETALL', STATES), redis.call('HGETALL', HOT)}
"""
)
