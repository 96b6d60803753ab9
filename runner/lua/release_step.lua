-- release_step: a holder that has to stop lets go of its step; that costs no attempt, a few times.
-- KEYS[1] run HASH
-- KEYS[2] due ZSET
-- KEYS[3] trace LIST
-- KEYS[4] slots ZSET, before the name of a limit
-- KEYS[5] waiting ZSET, before the name of a limit
-- KEYS[6] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] epoch of the holder
-- ARGV[3] grace in ms
-- ARGV[4] max_releases of one step that cost nothing
-- ARGV[5] requests made
-- ARGV[6] prompt_tokens
-- ARGV[7] completion_tokens
-- ARGV[8] total_tokens
-- ARGV[9] unknown_usage count
-- ARGV[10] cost in billionths, or empty where there is no price
-- ARGV[11] trace entry as JSON, or empty
-- Returns OK | ALREADY | STALE | FENCED | CANCELLED
local refused = refuse(KEYS[1])
if refused then
  return refused
end
local phase, epoch, lease, step = unpack(redis.call('HMGET', KEYS[1], 'phase', 'epoch', 'lease', 'step'))
if epoch ~= ARGV[2] or phase ~= 'model' then
  return {'FENCED'}
end
if lease == '0' then
  return {'ALREADY'}
end
if redis.call('HINCRBY', KEYS[1], 'releases', 1) > tonumber(ARGV[4]) then
  -- Stopped again and again in the same step: from here on it counts like a death.
  redis.call('HINCRBY', KEYS[1], 'deaths', 1)
end
add_usage(KEYS[1], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10])
if ARGV[11] ~= '' then
  redis.call('RPUSH', KEYS[3], ARGV[11])
end
local places = {run = KEYS[1], due = KEYS[2], slots = KEYS[4], waiting = KEYS[5], crowded = KEYS[6]}
local granted = {}
leave_model(places, ARGV[1] .. '.' .. step, ARGV[8], 0, true, granted)
redis.call('HSET', KEYS[1], 'status', 'queued', 'lease', 0, 'hinted', int(now), 'hints', 1)
redis.call('ZADD', KEYS[2], int(now + tonumber(ARGV[3])), ARGV[1])
return with_granted({'OK'}, granted)
