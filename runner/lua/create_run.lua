-- create_run: accepts a goal. From here on the run is due until it ends, whatever becomes of hints.
-- It may go on from the history of a run that has ended. In a conversation one run is live: a second
-- is refused, or it waits until the one in front has ended.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] events STREAM
-- KEYS[4] due ZSET
-- KEYS[5] runs ZSET
-- KEYS[6] idempotency STRING
-- KEYS[7] conversation LIST, the live or last run and those that wait
-- ARGV[1] id of the run
-- ARGV[2] idempotency_ttl in ms, 0 without a key
-- ARGV[3] timeout in ms, from now to the deadline
-- ARGV[4] grace in ms, until somebody looks whether the hint arrived
-- ARGV[5] max_events kept in the stream
-- ARGV[6] event data as JSON
-- ARGV[7] message_count
-- ARGV[8] tenant that the run belongs to
-- ARGV[9] after id of the run whose history it goes on from, or empty
-- ARGV[10] when_busy what to do in a conversation that has a live run: reject, enqueue or interrupt; empty
--   without a conversation
-- ARGV[11] max_waiting runs of a conversation
-- ARGV[12] waiting event data as JSON, for a run that isn't the first
-- ARGV[13..] messages as JSON, then fields of the record with their values
-- Returns CREATED | WAIT | EXISTS | BUSY | STALE, with the id of the run, and (WAIT) of the live one; or (BUSY, STALE) of the one in the way
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
local function other(id, key)
  return key_of(KEYS[1], ARGV[1], id, key)
end
local previous, live = ARGV[9], false
if previous ~= '' then
  local status, tenant = unpack(redis.call('HMGET', other(previous, KEYS[1]), 'status', 'tenant'))
  if not status or tenant ~= ARGV[8] then
    return {'STALE', previous}
  end
  if status ~= 'finished' then
    return {'BUSY', previous}
  end
end
if ARGV[10] ~= '' then
  local first = redis.call('LINDEX', KEYS[7], 0)
  live = first and is_live(other(first, KEYS[1])) and first
  if live and (ARGV[10] == 'reject' or redis.call('LLEN', KEYS[7]) > tonumber(ARGV[11])) then
    return {'BUSY', live}
  end
  if first and not live and redis.call('EXISTS', other(first, KEYS[1])) == 1 then
    previous = first
  end
end
if ttl > 0 then
  redis.call('SET', KEYS[6], ARGV[1], 'PX', ARGV[2])
  redis.call('HSET', KEYS[1], 'idempotency', KEYS[6])
end
local count = tonumber(ARGV[7])
for i = 13, 12 + count do
  redis.call('RPUSH', KEYS[2], ARGV[i])
end
redis.call('HSET', KEYS[1], 'status', 'queued', 'phase', 'model', 'step', 0, 'epoch', 0, 'goal', count - 1,
  'created', int(now), 'deadline', int(now + tonumber(ARGV[3])), 'hinted', int(now), 'hints', 1)
if previous ~= '' then
  follow_history(KEYS[1], KEYS[2], previous, other(previous, KEYS[2]))
end
for i = 13 + count, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('ZADD', KEYS[4], int(now + tonumber(ARGV[4])), ARGV[1])
-- The index cleans itself: whatever has expired leaves as something new comes.
redis.call('ZREMRANGEBYSCORE', KEYS[5], 0, int(now))
redis.call('ZADD', KEYS[5], '+inf', ARGV[1])
add_event(KEYS[3], ARGV[5], 'run.created', '', '', ARGV[6])
if ARGV[10] == '' then
  return with_first_step({'CREATED', ARGV[1]}, KEYS[1], ARGV[1])
end
redis.call('HSET', KEYS[1], 'conversation_key', KEYS[7])
if not live then
  redis.call('DEL', KEYS[7])  -- and its TTL with it
  redis.call('RPUSH', KEYS[7], ARGV[1])
  return with_first_step({'CREATED', ARGV[1]}, KEYS[1], ARGV[1])
end
if ARGV[10] == 'interrupt' then
  redis.call('LINSERT', KEYS[7], 'AFTER', live, ARGV[1])
  redis.call('HSET', KEYS[1], 'interrupts', live)
else
  redis.call('RPUSH', KEYS[7], ARGV[1])
end
redis.call('HSET', KEYS[1], 'status', 'waiting', 'phase', 'parked', 'timeout', ARGV[3])
add_event(KEYS[3], ARGV[5], 'run.waiting', '', '', ARGV[12])
return {'WAIT', ARGV[1], live}
