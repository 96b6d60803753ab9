-- renew_call: the heartbeat of a call's holder; tells it when to let go.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- ARGV[1] step number
-- ARGV[2] index of the call in its step
-- ARGV[3] epoch of the holder
-- ARGV[4] lease in ms
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
redis.call('HSET', KEYS[2], field .. 'lease', int(now + tonumber(ARGV[4])))
return {'OK'}
