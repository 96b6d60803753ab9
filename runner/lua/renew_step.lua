-- renew_step: the heartbeat of a step's holder; tells it when to let go.
-- KEYS[1] run HASH
-- ARGV[1] epoch of the holder
-- ARGV[2] lease in ms
-- Returns OK | FENCED | STALE | CANCELLED | EXPIRED
local refused = refuse(KEYS[1])
if refused then
  return refused
end
local phase, epoch, lease = unpack(redis.call('HMGET', KEYS[1], 'phase', 'epoch', 'lease'))
-- Without a lease the attempt is over (committed, parked, released): a late heartbeat holds nothing.
if epoch ~= ARGV[1] or lease == '0' or phase ~= 'model' then
  return {'FENCED'}
end
if now >= numbers(KEYS[1], 'deadline') then
  return {'EXPIRED'}
end
redis.call('HSET', KEYS[1], 'lease', int(now + tonumber(ARGV[2])))
return {'OK'}
