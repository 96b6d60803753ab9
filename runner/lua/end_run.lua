-- end_run: the one way a run ends, by the holder of its step or from outside (a cancel, a limit).
-- Closes an open block, so that the history stays whole; every key of the run gets its TTL. An answer
-- that comes while a message of the user's waits is a turn and no end: the next step is opened. The run
-- that waits behind this one in its conversation begins.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] calls HASH
-- KEYS[4] results HASH
-- KEYS[5] evidence LIST
-- KEYS[6] events STREAM
-- KEYS[7] trace LIST
-- KEYS[8] due ZSET
-- KEYS[9] runs ZSET
-- KEYS[10] view STRING
-- KEYS[11] whole HASH
-- KEYS[12] inbox LIST
-- KEYS[13] sent SET
-- KEYS[14] slots ZSET, before the name of a limit
-- KEYS[15] waiting ZSET, before the name of a limit
-- KEYS[16] crowded SET
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
-- ARGV[16] cost in billionths, or empty where there is no price
-- ARGV[17] steps begun by this end that were not committed otherwise
-- ARGV[18] trace entry as JSON, or empty
-- ARGV[19] event data as JSON
-- ARGV[20] channel for the nudge
-- ARGV[21] grace in ms, for the holder to deliver what the end was promised to
-- ARGV[22] held 1 by the holder of the step, 0 from outside
-- ARGV[23] answered event data as JSON, where the model has answered, or empty
-- Returns OK | STEP | ALREADY | STALE | FENCED, with the stop reason that stands, 1 where its end was promised to somebody, and the run that begins now; or (STEP) with the step that was opened
local status, phase, step, epoch, stop, gone_on, lease = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'phase', 'step', 'epoch', 'stop_reason', 'gone_on', 'lease'))
if not status then
  return {'STALE'}
end
if status == 'finished' then
  return {'ALREADY', stop}
end
if ARGV[3] == 'COMPLETED' and ARGV[2] ~= '' and gone_on == ARGV[2] then
  -- The same answer again, which was no end: the reply was lost on its way.
  return {'STEP', step}
end
local held = ARGV[22] == '1'
-- Without a lease the attempt is over: what was committed or let go is no longer its holder's to end, and
-- that may be the next step by now.
if ARGV[2] ~= '' and epoch ~= ARGV[2] or held and (phase ~= 'model' or lease == '0') then
  return {'FENCED'}
end
local places = {run = KEYS[1], due = KEYS[8], slots = KEYS[14], waiting = KEYS[15], crowded = KEYS[16]}
local granted, leaving = {}, {}
if phase == 'tools' then
  local count = numbers(KEYS[1], 'calls')
  for i = 0, count - 1 do
    if redis.call('HEXISTS', KEYS[4], i) == 0 then
      add_event(KEYS[6], ARGV[10], 'call.finished', step, step .. '.' .. i,
        '{"ok":false,"error":"CANCELLED"}')
      leaving[ARGV[1] .. '.' .. step .. '.' .. i] = redis.call('HGET', KEYS[3], i .. '.limits') or nil
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
if ARGV[3] == 'COMPLETED' and ARGV[2] ~= '' and redis.call('LLEN', KEYS[12]) > 0 then
  -- A new epoch: whoever gave this answer has no say in what follows.
  redis.call('HINCRBY', KEYS[1], 'epoch', 1)
  redis.call('HINCRBY', KEYS[1], 'tool_answers', held and 0 or 1)
  redis.call('HDEL', KEYS[1], 'final', 'attempt')
  redis.call('HSET', KEYS[1], 'status', 'queued', 'gone_on', ARGV[2], 'lease', 0, 'not_before', 0,
    'deaths', 0, 'releases', 0, 'model_attempts', 0, 'hinted', int(now), 'hints', 1)
  redis.call('ZADD', KEYS[8], int(now + tonumber(ARGV[21])), ARGV[1])
  leave_model(places, ARGV[1] .. '.' .. step, ARGV[14], 0, false, granted)
  return with_granted({'STEP', redis.call('HGET', KEYS[1], 'step')}, granted)
end
take_inbox(KEYS[12], KEYS[2])
redis.call('HSET', KEYS[1], 'status', 'finished', 'phase', 'ended', 'stop_reason', ARGV[3],
  'answer', ARGV[4], 'error', ARGV[5], 'limit', ARGV[6], 'ended', int(now), 'lease', 0)
-- From here on none of its own calls is given a turn that another lets go.
leave_model(places, ARGV[1] .. '.' .. step, ARGV[14], 0, false, granted)
for holder, limits in pairs(leaving) do
  free_places(places, limits, holder, granted)
end
local promised = redis.call('HGET', KEYS[1], 'promised') == '1'
if promised then
  redis.call('ZADD', KEYS[8], int(held and now + tonumber(ARGV[21]) or now), ARGV[1])
else
  redis.call('ZREM', KEYS[8], ARGV[1])
end
redis.call('ZADD', KEYS[9], int(now + tonumber(ARGV[9])), ARGV[1])
add_event(KEYS[6], ARGV[10], 'run.finished', '', '', ARGV[19])
pack_events(KEYS[6])
for i = 1, 7 do
  redis.call('PEXPIRE', KEYS[i], ARGV[9])
end
redis.call('PEXPIRE', KEYS[10], ARGV[9])
redis.call('PEXPIRE', KEYS[11], ARGV[9])
redis.call('PEXPIRE', KEYS[13], ARGV[9])
-- The key outlives the run: a request that is repeated late still finds what became of it.
keep_key(KEYS[1], ARGV[1], 2 * ARGV[9])
if not held then
  redis.call('PUBLISH', ARGV[20], ARGV[1])
end
local conversation = redis.call('HGET', KEYS[1], 'conversation_key')
local following
if conversation then
  following = hand_on(conversation, KEYS[1], KEYS[2], ARGV[1], KEYS[8], ARGV[21])
  if following then
    redis.call('HSET', key_of(KEYS[1], ARGV[1], following, KEYS[1]), 'status', 'queued')
    granted[#granted + 1] = following .. '.0'
  elseif redis.call('LINDEX', conversation, 0) == ARGV[1] then
    redis.call('PEXPIRE', conversation, ARGV[9])
  else
    redis.call('LREM', conversation, 0, ARGV[1])  -- it never had its turn
  end
end
return with_granted({'OK', ARGV[3], promised and '1' or '', following or ''}, granted)
