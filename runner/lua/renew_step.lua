-- renew_step: the heartbeat of a step's holder; tells it when to let go.
-- KEYS[1] run HASH
-- KEYS[2] due ZSET
-- KEYS[3] slots ZSET, before the name of a limit
-- KEYS[4] waiting ZSET, before the name of a limit
-- KEYS[5] crowded SET
-- ARGV[1] epoch of the holder
-- ARGV[2] lease in ms
-- ARGV[3] id of the run
-- Returns OK | FENCED | STALE | CANCELLED | EXPIRED
local refused = refuse(KEYS[1])
if refused then
  return refused
end
local phase, epoch, lease, step, limits = unpack(
  redis.call('HMGET', KEYS[1], 'phase', 'epoch', 'lease', 'step', 'model_limits'))
-- Without a lease the attempt is over (committed, parked, released): a late heartbeat holds nothing.
if epoch ~= ARGV[1] or lease == '0' or phase ~= 'model' then
  return {'FENCED'}
end
if now >= numbers(KEYS[1], 'deadline') then
  return {'EXPIRED'}
end
local places = {run = KEYS[1], due = KEYS[2], slots = KEYS[3], waiting = KEYS[4], crowded = KEYS[5]}
local ends = now + tonumber(ARGV[2])
if not keep_places(places, limits, ARGV[3] .. '.' .. step, ends) then
  return {'FENCED'}
end
redis.call('HSET', KEYS[1], 'lease', int(ends))
return {'OK'}
