-- retry_call: puts a call back that failed in a way that may pass, to be started again after a delay.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- KEYS[3] events STREAM
-- KEYS[4] trace LIST
-- KEYS[5] due ZSET
-- KEYS[6] slots ZSET, before the name of a limit
-- KEYS[7] waiting ZSET, before the name of a limit
-- KEYS[8] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] index of the call in its step
-- ARGV[4] epoch of the holder
-- ARGV[5] delay in ms
-- ARGV[6] max_events kept in the stream
-- ARGV[7] trace entry as JSON
-- ARGV[8] event data as JSON
-- ARGV[9] passes: how often a worker that lacks the tool may pass it on, 0 where the tool was started
-- Returns OK | ALREADY | STALE | FENCED | CANCELLED | LOST
local step = ARGV[2]
local refused = refuse(KEYS[1], step, 'tools')
if refused then
  return refused
end
local field = ARGV[3] .. '.'
local epoch, state = unpack(redis.call('HMGET', KEYS[2], field .. 'epoch', field .. 'state'))
if epoch ~= ARGV[4] or state == 'done' then
  return {'FENCED'}
end
if state ~= 'running' then
  -- Put back before, and maybe in a queue by now: it keeps its place there.
  return {'ALREADY'}
end
if tonumber(ARGV[9]) > 0 then
  if redis.call('HINCRBY', KEYS[2], field .. 'passes', 1) > tonumber(ARGV[9]) then
    return {'LOST'}
  end
  redis.call('HINCRBY', KEYS[2], field .. 'started', -1)
else
  -- Whoever has run it may know its tool by another number of attempts than the worker that opened it.
  local starts, started = numbers(KEYS[2], field .. 'starts', field .. 'started')
  if started >= starts then
    return {'LOST'}
  end
end
local places = {run = KEYS[1], due = KEYS[5], slots = KEYS[6], waiting = KEYS[7], crowded = KEYS[8]}
local granted = {}
local holder = ARGV[1] .. '.' .. step .. '.' .. ARGV[3]
free_places(places, redis.call('HGET', KEYS[2], field .. 'limits'), holder, granted)
redis.call('HDEL', KEYS[2], field .. 'order')
local not_before = int(now + tonumber(ARGV[5]))
redis.call('HSET', KEYS[2], field .. 'state', 'queued', field .. 'lease', 0,
  field .. 'not_before', not_before)
redis.call('RPUSH', KEYS[4], ARGV[7])
redis.call('ZADD', KEYS[5], 'LT', not_before, ARGV[1])
add_event(KEYS[3], ARGV[6], 'call.waiting', step, step .. '.' .. ARGV[3], ARGV[8])
return with_granted({'OK'}, granted)
