-- end_run: the one way a run ends, by the holder of its step or from outside (a cancel, a limit).
-- Closes an open block, so that the history stays whole; every key of the run gets its TTL.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] calls HASH
-- KEYS[4] results HASH
-- KEYS[5] evidence LIST
-- KEYS[6] events STREAM
-- KEYS[7] trace LIST
-- KEYS[8] due ZSET
-- KEYS[9] runs ZSET
-- ARGV[1] id of the run
-- ARGV[2] epoch of the run as whoever ends it saw it, or empty: a cancel ends it whatever has happened
-- ARGV[3] stop_reason to write
-- ARGV[4] answer as JSON, or empty
-- ARGV[5] error as JSON, or empty
-- ARGV[6] limit that stopped it, or empty
-- ARGV[7] message that ends the history as JSON, or empty
-- ARGV[8] closer content for calls without a result, as a JSON string
-- ARGV[9] retention in ms
-- ARGV[10] max_events kept in the stream
-- ARGV[11] requests made
-- ARGV[12] prompt_tokens
-- ARGV[13] completion_tokens
-- ARGV[14] total_tokens
-- ARGV[15] unknown_usage count
-- ARGV[16] cost in billionths
-- ARGV[17] steps begun by this end that were not committed otherwise
-- ARGV[18] trace entry as JSON, or empty
-- ARGV[19] event data as JSON
-- ARGV[20] channel for the nudge
-- ARGV[21] grace in ms, for the holder to deliver what the end was promised to
-- ARGV[22] held 1 by the holder of the step, 0 from outside
-- ARGV[23] answered event data as JSON, where the model has answered, or empty
-- Returns OK | ALREADY | STALE | FENCED, with the stop reason that stands, and 1 where its end was promised to somebody
local status, phase, step, epoch, stop = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'phase', 'step', 'epoch', 'stop_reason'))
if not status then
  return {'STALE'}
end
if status == 'finished' then
  return {'ALREADY', stop}
end
local held = ARGV[22] == '1'
if ARGV[2] ~= '' and epoch ~= ARGV[2] or held and phase ~= 'model' then
  return {'FENCED'}
end
if phase == 'tools' then
  local count = numbers(KEYS[1], 'calls')
  for i = 0, count - 1 do
    if redis.call('HEXISTS', KEYS[4], i) == 0 then
      add_event(KEYS[6], ARGV[10], 'call.finished', step, step .. '.' .. i,
        '{"ok":false,"error":"CANCELLED"}')
    end
  end
  append_results(KEYS[2], KEYS[3], KEYS[5], count, ARGV[8])
  redis.call('DEL', KEYS[3], KEYS[4])
  redis.call('HINCRBY', KEYS[1], 'step', 1)
end
redis.call('HINCRBY', KEYS[1], 'step', ARGV[17])
if ARGV[7] ~= '' then
  redis.call('RPUSH', KEYS[2], ARGV[7])
end
if ARGV[18] ~= '' then
  redis.call('RPUSH', KEYS[7], ARGV[18])
end
if ARGV[23] ~= '' then
  add_event(KEYS[6], ARGV[10], 'model.answered', step, '', ARGV[23])
end
add_usage(KEYS[1], ARGV[11], ARGV[12], ARGV[13], ARGV[14], ARGV[15], ARGV[16])
redis.call('HSET', KEYS[1], 'status', 'finished', 'phase', 'ended', 'stop_reason', ARGV[3],
  'answer', ARGV[4], 'error', ARGV[5], 'limit', ARGV[6], 'ended', int(now), 'lease', 0)
local promised = redis.call('HGET', KEYS[1], 'promised') == '1'
if promised then
  redis.call('ZADD', KEYS[8], int(held and now + tonumber(ARGV[21]) or now), ARGV[1])
else
  redis.call('ZREM', KEYS[8], ARGV[1])
end
redis.call('ZADD', KEYS[9], int(now + tonumber(ARGV[9])), ARGV[1])
add_event(KEYS[6], ARGV[10], 'run.finished', '', '', ARGV[19])
for i = 1, 7 do
  redis.call('PEXPIRE', KEYS[i], ARGV[9])
end
-- The key outlives the run: a request that is repeated late still finds what became of it.
keep_key(KEYS[1], ARGV[1], 2 * ARGV[9])
if not held then
  redis.call('PUBLISH', ARGV[20], ARGV[1])
end
return {'OK', ARGV[3], promised and '1' or nil}
