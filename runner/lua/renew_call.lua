-- renew_call: the heartbeat of a call's holder; tells it when to let go.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- KEYS[3] due ZSET
-- KEYS[4] slots ZSET, before the name of a limit
-- KEYS[5] waiting ZSET, before the name of a limit
-- KEYS[6] crowded SET
-- ARGV[1] step number
-- ARGV[2] index of the call in its step
-- ARGV[3] epoch of the holder
-- ARGV[4] lease in ms
-- ARGV[5] id of the run
-- Returns OK | FENCED | STALE | CANCELLED | EXPIRED
local refused = refuse(KEYS[1], ARGV[1], 'tools')
if refused then
  return refused
end
local field = ARGV[2] .. '.'
local epoch, state = unpack(redis.call('HMGET', KEYS[2], field .. 'epoch', field .. 'state'))
if epoch ~= ARGV[3] or state ~= 'running' then
  return {'FENCED'}
end
if now >= numbers(KEYS[1], 'deadline') then
  return {'EXPIRED'}
end
local places = {run = KEYS[1], due = KEYS[3], slots = KEYS[4], waiting = KEYS[5], crowded = KEYS[6]}
local holder, ends = ARGV[5] .. '.' .. ARGV[1] .. '.' .. ARGV[2], now + tonumber(ARGV[4])
if not keep_places(places, redis.call('HGET', KEYS[2], field .. 'limits'), holder, ends) then
  return {'FENCED'}
end
redis.call('HSET', KEYS[2], field .. 'lease', int(ends))
return {'OK'}
