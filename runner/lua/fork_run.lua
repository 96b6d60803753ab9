-- fork_run: begins a run at a later step, with the history and the evidence that another had by then.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] evidence LIST
-- KEYS[4] events STREAM
-- KEYS[5] trace LIST
-- KEYS[6] due ZSET
-- KEYS[7] runs ZSET
-- KEYS[8] whole HASH
-- KEYS[9] source_whole HASH, of the run that it comes from
-- ARGV[1] id of the run
-- ARGV[2] step number to begin with
-- ARGV[3] timeout in ms, from now to the deadline
-- ARGV[4] grace in ms, until somebody looks whether the hint arrived
-- ARGV[5] max_events kept in the stream
-- ARGV[6] event data as JSON
-- ARGV[7] trace entry as JSON, which says where the run comes from
-- ARGV[8] found evidence as a JSON list, or empty
-- ARGV[9] message_count
-- ARGV[10..] messages as JSON, then fields of the record with their values
-- Returns CREATED | EXISTS, with the id of the run
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'EXISTS', ARGV[1]}
end
local count = tonumber(ARGV[9])
for i = 10, 9 + count do
  redis.call('RPUSH', KEYS[2], ARGV[i])
end
if ARGV[8] ~= '' then
  redis.call('RPUSH', KEYS[3], ARGV[8])
end
redis.call('RPUSH', KEYS[5], ARGV[7])
for _, call in ipairs(redis.call('HKEYS', KEYS[9])) do
  if tonumber(string.match(call, '^%d+')) < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[8], call, redis.call('HGET', KEYS[9], call))
  end
end
redis.call('HSET', KEYS[1], 'status', 'queued', 'phase', 'model', 'step', ARGV[2], 'epoch', 0,
  'created', int(now), 'deadline', int(now + tonumber(ARGV[3])), 'hinted', int(now), 'hints', 1)
for i = 10 + count, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('ZADD', KEYS[6], int(now + tonumber(ARGV[4])), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[7], 0, int(now))
redis.call('ZADD', KEYS[7], '+inf', ARGV[1])
add_event(KEYS[4], ARGV[5], 'run.created', '', '', ARGV[6])
return with_first_step({'CREATED', ARGV[1]}, KEYS[1], ARGV[1])
