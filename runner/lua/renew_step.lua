-- renew_step: the heartbeat of a step's holder; tells it when to let go.
-- KEYS[1] run HASH
-- ARGV[1] epoch of the holder
-- ARGV[2] lease in ms
-- Returns OK | FENCED | STALE | CANCELLED | EXPIRED
local status, epoch, stop, deadline, lease = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'epoch', 'stop_reason', 'deadline', 'lease'))
if not status then
  return {'STALE'}
end
if status == 'finished' then
  return {stop == 'CANCELLED' and 'CANCELLED' or 'STALE'}
end
-- Without a lease the attempt is over (committed, parked, released): a late heartbeat holds nothing.
if epoch ~= ARGV[1] or lease == '0' or redis.call('HGET', KEYS[1], 'phase') ~= 'model' then
  return {'FENCED'}
end
if now >= tonumber(deadline) then
  return {'EXPIRED'}
end
redis.call('HSET', KEYS[1], 'lease', int(now + tonumber(ARGV[2])))
return {'OK'}
