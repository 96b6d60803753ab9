-- create_run: accepts a goal. From here on the run is due until it ends, whatever becomes of hints.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] events STREAM
-- KEYS[4] due ZSET
-- KEYS[5] runs ZSET
-- KEYS[6] idempotency STRING
-- ARGV[1] id of the run
-- ARGV[2] idempotency_ttl in ms, 0 without a key
-- ARGV[3] timeout in ms, from now to the deadline
-- ARGV[4] grace in ms, until somebody looks whether the hint arrived
-- ARGV[5] max_events kept in the stream
-- ARGV[6] event data as JSON
-- ARGV[7] message_count
-- ARGV[8..] messages as JSON, then fields of the record with their values
-- Returns CREATED | EXISTS, with the id of the run
local ttl = tonumber(ARGV[2])
if ttl > 0 then
  local known = redis.call('GET', KEYS[6])
  if known then
    return {'EXISTS', known}
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'EXISTS', ARGV[1]}
end
if ttl > 0 then
  redis.call('SET', KEYS[6], ARGV[1], 'PX', ARGV[2])
  redis.call('HSET', KEYS[1], 'idempotency', KEYS[6])
end
local count = tonumber(ARGV[7])
for i = 8, 7 + count do
  redis.call('RPUSH', KEYS[2], ARGV[i])
end
redis.call('HSET', KEYS[1], 'status', 'queued', 'phase', 'model', 'step', 0, 'epoch', 0,
  'created', int(now), 'deadline', int(now + tonumber(ARGV[3])), 'hinted', int(now), 'hints', 1)
for i = 8 + count, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('ZADD', KEYS[4], int(now + tonumber(ARGV[4])), ARGV[1])
-- The index cleans itself: whatever has expired leaves as something new comes.
redis.call('ZREMRANGEBYSCORE', KEYS[5], 0, int(now))
redis.call('ZADD', KEYS[5], '+inf', ARGV[1])
add_event(KEYS[3], ARGV[5], 'run.created', '', '', ARGV[6])
return {'CREATED', ARGV[1]}
