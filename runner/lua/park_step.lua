-- park_step: lets go of a step that has to wait (a server's Retry-After, a backoff). No worker waits.
-- KEYS[1] run HASH
-- KEYS[2] events STREAM
-- KEYS[3] trace LIST
-- KEYS[4] due ZSET
-- KEYS[5] slots ZSET, before the name of a limit
-- KEYS[6] waiting ZSET, before the name of a limit
-- KEYS[7] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] epoch of the holder
-- ARGV[4] delay in ms
-- ARGV[5] max_events kept in the stream
-- ARGV[6] requests made
-- ARGV[7] prompt_tokens
-- ARGV[8] completion_tokens
-- ARGV[9] total_tokens
-- ARGV[10] unknown_usage count
-- ARGV[11] cost in billionths, or empty where there is no price
-- ARGV[12] trace entry as JSON, or empty
-- ARGV[13] event data as JSON
-- ARGV[14] attempts that this one counts for: 1, or 0 where no model was asked
-- ARGV[15] switch 1 where the agent's next model is to be asked instead, with attempts of its own
-- ARGV[16] warning of budgets as JSON, or empty
-- ARGV[17] pause in ms, for which nobody is to ask this model: its server said so, or 0
-- Returns OK | ALREADY | STALE | FENCED | CANCELLED
local refused = refuse(KEYS[1])
if refused then
  return refused
end
local phase, step, epoch, lease = unpack(
  redis.call('HMGET', KEYS[1], 'phase', 'step', 'epoch', 'lease'))
if step ~= ARGV[2] or epoch ~= ARGV[3] or phase ~= 'model' then
  return {'FENCED'}
end
if lease == '0' then
  return {'ALREADY'}
end
local places = {run = KEYS[1], due = KEYS[4], slots = KEYS[5], waiting = KEYS[6], crowded = KEYS[7]}
local granted = {}
leave_model(places, ARGV[1] .. '.' .. step, ARGV[9], tonumber(ARGV[17]), false, granted)
local not_before = now + tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'status', 'waiting', 'lease', 0,
  'not_before', int(not_before))
redis.call('HINCRBY', KEYS[1], 'model_attempts', ARGV[14])
if ARGV[15] == '1' then
  redis.call('HINCRBY', KEYS[1], 'model', 1)
  redis.call('HSET', KEYS[1], 'model_attempts', 0)
end
add_usage(KEYS[1], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11])
warn_of_budgets(KEYS[2], ARGV[5], step, ARGV[16])
if ARGV[12] ~= '' then
  redis.call('RPUSH', KEYS[3], ARGV[12])
end
redis.call('ZADD', KEYS[4], int(math.min(not_before, numbers(KEYS[1], 'deadline'))), ARGV[1])
add_event(KEYS[2], ARGV[5], 'run.waiting', step, '', ARGV[13])
return with_granted({'OK'}, granted)
