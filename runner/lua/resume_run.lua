-- resume_run: takes a run up again that a limit or an error has ended; what it did stands.
-- The limits count from here: so many more steps, so much more time.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] evidence LIST
-- KEYS[4] events STREAM
-- KEYS[5] trace LIST
-- KEYS[6] due ZSET
-- KEYS[7] runs ZSET
-- KEYS[8] view STRING
-- KEYS[9] whole HASH
-- KEYS[10] sent SET
-- ARGV[1] id of the run
-- ARGV[2] resumed how often before, so that the same request sent twice resumes once
-- ARGV[3] timeout in ms, from now to the deadline
-- ARGV[4] grace in ms
-- ARGV[5] max_events kept in the stream
-- ARGV[6] retention in ms
-- ARGV[7] trace entry as JSON
-- ARGV[8..] fields of the record with their values
-- Returns OK | ALREADY | STALE | FENCED | BUSY
local status, step, stop = unpack(redis.call('HMGET', KEYS[1], 'status', 'step', 'stop_reason'))
if not status then
  return {'STALE'}
end
if status ~= 'finished' then
  return {'ALREADY'}
end
local resumable = {MAX_STEPS = true, TIMEOUT = true, BUDGET_EXHAUSTED = true, ERROR = true}
if not resumable[stop] or numbers(KEYS[1], 'resumed') ~= tonumber(ARGV[2]) then
  return {'FENCED'}
end
local conversation = redis.call('HGET', KEYS[1], 'conversation_key')
if conversation then
  local first = redis.call('LINDEX', conversation, 0)
  if first and first ~= ARGV[1] then
    return {'BUSY'}  -- the conversation has gone on without it
  end
  redis.call('DEL', conversation)
  redis.call('RPUSH', conversation, ARGV[1])
end
for i = 1, 5 do
  redis.call('PERSIST', KEYS[i])
end
redis.call('PERSIST', KEYS[8])
redis.call('PERSIST', KEYS[9])
redis.call('PERSIST', KEYS[10])
-- A new epoch: whoever held the run before it ended has no say in what follows.
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HINCRBY', KEYS[1], 'resumed', 1)
redis.call('HDEL', KEYS[1], 'stop_reason', 'answer', 'error', 'limit', 'fatal', 'final', 'ended', 'attempt')
redis.call('HSET', KEYS[1], 'status', 'queued', 'phase', 'model', 'deaths', 0, 'releases', 0,
  'model_attempts', 0, 'model', 0, 'invalid_calls', 0, 'not_before', 0, 'lease', 0, 'deliveries', 0,
  'deadline', int(now + tonumber(ARGV[3])), 'hinted', int(now), 'hints', 1, unpack(ARGV, 8))
keep_key(KEYS[1], ARGV[1], tonumber(ARGV[3]) + 2 * ARGV[6])
redis.call('ZADD', KEYS[6], int(now + tonumber(ARGV[4])), ARGV[1])
redis.call('ZADD', KEYS[7], '+inf', ARGV[1])
redis.call('RPUSH', KEYS[5], ARGV[7])
add_event(KEYS[4], ARGV[5], 'run.resumed', step, '', '{}')
return with_granted({'OK'}, {ARGV[1] .. '.' .. step})
