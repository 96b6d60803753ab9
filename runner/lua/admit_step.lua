-- admit_step: lets a step's attempt ask its model, or parks it until the model's limits and pace allow it.
-- KEYS[1] run HASH
-- KEYS[2] events STREAM
-- KEYS[3] due ZSET
-- KEYS[4] pace HASH
-- KEYS[5] slots ZSET, before the name of a limit
-- KEYS[6] waiting ZSET, before the name of a limit
-- KEYS[7] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] epoch of the holder
-- ARGV[4] limits of the model, or empty
-- ARGV[5] tokens a minute, 0 for any number
-- ARGV[6] max_events kept in the stream
-- ARGV[7] longest wait in ms until it asks again
-- Returns OK | PARKED | STALE | FENCED | CANCELLED
local step = ARGV[2]
local refused = refuse(KEYS[1], step, 'model')
if refused then
  return refused
end
local epoch, lease, order, deadline, admitted = unpack(
  redis.call('HMGET', KEYS[1], 'epoch', 'lease', 'order', 'deadline', 'admitted'))
if epoch ~= ARGV[3] then
  return {'FENCED'}
end
if lease == '0' then
  return {'PARKED'}
end
if admitted == epoch then
  return {'OK'}
end
local closed, used = numbers(KEYS[4], 'closed', 'used')
local open_at = math.max(closed, tonumber(ARGV[5]) > 0 and used - 60000 or 0)
local places = {run = KEYS[1], due = KEYS[3], slots = KEYS[5], waiting = KEYS[6], crowded = KEYS[7]}
local granted, full, holder = {}, nil, ARGV[1] .. '.' .. step
if now < open_at then
  full = 'model.pace'
else
  full = take_places(places, ARGV[4], holder, holder .. '#' .. epoch, order or arrival, math.max(tonumber(lease), now + 1000), granted)
  open_at = now + tonumber(ARGV[7])
end
if not full then
  redis.call('HSET', KEYS[1], 'model_limits', ARGV[4], 'pace', KEYS[4], 'parked', '', 'admitted', epoch)
  redis.call('HSET', KEYS[4], 'per_minute', ARGV[5])
  redis.call('PEXPIRE', KEYS[4], int(math.max(used, closed, now) - now + 3600000))
  return with_granted({'OK'}, granted)
end
redis.call('HSET', KEYS[1], 'status', 'waiting', 'lease', 0, 'not_before', int(open_at), 'model_limits', ARGV[4])
if full ~= 'model.pace' then
  redis.call('HSET', KEYS[1], 'parked', 'parked')
  redis.call('HSETNX', KEYS[1], 'order', arrival)
end
redis.call('ZADD', KEYS[3], int(math.min(open_at, tonumber(deadline))), ARGV[1])
if not order then
  add_event(KEYS[2], ARGV[6], 'run.waiting', step, '', '{"reason":"LIMIT","limit":"' .. full .. '"}')
end
return with_granted({'PARKED'}, granted)
