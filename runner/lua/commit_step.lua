-- commit_step: appends what a step's model call brought, and opens its calls; without calls left to
-- run, opens the next step at once. Calls above `parallel` are held back until one in front is done.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] calls HASH
-- KEYS[4] results HASH
-- KEYS[5] events STREAM
-- KEYS[6] trace LIST
-- KEYS[7] due ZSET
-- KEYS[8] slots ZSET, before the name of a limit
-- KEYS[9] waiting ZSET, before the name of a limit
-- KEYS[10] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] epoch of the holder
-- ARGV[4] grace in ms
-- ARGV[5] max_events kept in the stream
-- ARGV[6] parallel calls in flight at most
-- ARGV[7] invalid calls among these
-- ARGV[8] requests made
-- ARGV[9] prompt_tokens
-- ARGV[10] completion_tokens
-- ARGV[11] total_tokens
-- ARGV[12] unknown_usage count
-- ARGV[13] cost in billionths, or empty where there is no price
-- ARGV[14] trace entry as JSON
-- ARGV[15] event data as JSON
-- ARGV[16] fingerprint of the agent that took the step
-- ARGV[17] warning of budgets as JSON, or empty
-- ARGV[18] message_count
-- ARGV[19..] messages as JSON; then for each call ten: id, decision, event data, starts, result, content,
--   trace, name, who acts, and its limits or empty. Who acts is `run` a tool, `asked` a user who answers it,
--   or `approval <digest> <ms>` somebody who approves these arguments first, within so many ms (0: by the
--   run's deadline)
-- Returns OK | ALREADY | STALE | FENCED | CANCELLED, with the indexes whose hints are to be published
local refused, phase, step, epoch, all_refused, deadline = refuse(
  KEYS[1], nil, nil, 'phase', 'step', 'epoch', 'all_refused', 'deadline')
if refused then
  return refused
end
if all_refused == ARGV[3] and epoch == ARGV[3] then
  return {'ALREADY'}
end
if step ~= ARGV[2] or epoch ~= ARGV[3] then
  return {'FENCED'}
end
if phase ~= 'model' then
  -- The same attempt again: the reply was lost on its way.
  local queued = {'ALREADY'}
  for index = 0, numbers(KEYS[1], 'calls') - 1 do
    if not ENVELOPES and redis.call('HGET', KEYS[3], index .. '.state') == 'queued' then
      queued[#queued + 1] = index
    end
  end
  return queued
end
local places = {run = KEYS[1], due = KEYS[7], slots = KEYS[8], waiting = KEYS[9], crowded = KEYS[10]}
local granted = {}
leave_model(places, ARGV[1] .. '.' .. step, ARGV[11], 0, false, granted)
local first_call = 19 + tonumber(ARGV[18])
for i = 19, first_call - 1 do
  redis.call('RPUSH', KEYS[2], ARGV[i])
end
redis.call('RPUSH', KEYS[6], ARGV[14])
add_usage(KEYS[1], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13])
warn_of_budgets(KEYS[5], ARGV[5], step, ARGV[17])
local count = (#ARGV - first_call + 1) / 10
if ARGV[7] ~= '0' then
  redis.call('HINCRBY', KEYS[1], 'invalid_calls', ARGV[7])
end
redis.call('HSET', KEYS[1], 'lease', 0, 'not_before', 0, 'deaths', 0, 'releases', 0, 'model_attempts', 0,
  'hinted', now, 'hints', 1, 'status', 'running', 'fingerprint', ARGV[16],
  'phase', count > 0 and 'tools' or 'model', 'calls', count)
redis.call('ZADD', KEYS[7], now + tonumber(ARGV[4]), ARGV[1])
add_event(KEYS[5], ARGV[5], 'model.answered', step, '', ARGV[15])
if count == 0 then
  redis.call('HINCRBY', KEYS[1], 'step', 1)
  redis.call('HSET', KEYS[1], 'status', 'queued', 'all_refused', epoch)
  return with_granted({'OK'}, granted)
end
redis.call('DEL', KEYS[3], KEYS[4])
local free = tonumber(ARGV[6])
local hints, asked, moving = {'OK'}, false, false
local decide_by = tonumber(deadline or 0)
local started, used, held_back = 0, {}, false
local at, field  -- where the call that is opened stands in ARGV, and in the hash
local function open_call(...)
  redis.call('HSET', KEYS[3], field .. 'id', ARGV[at], field .. 'decision', ARGV[at + 1],
    field .. 'starts', ARGV[at + 3], ...)
end
for index = 0, count - 1 do
  local call = step .. '.' .. index
  at, field = first_call + index * 10, index .. '.'
  if ARGV[at + 4] ~= '' then
    -- Refused by the runtime: its result stands from the start, and it never runs.
    redis.call('HSET', KEYS[4], index, ARGV[at + 4])
    open_call(field .. 'state', 'done', field .. 'content', ARGV[at + 5])
    redis.call('RPUSH', KEYS[6], ARGV[at + 6])
    add_event(KEYS[5], ARGV[5], 'call.finished', step, call, ARGV[at + 2])
  elseif ARGV[at + 8] == 'asked' then
    -- Answered by a user and not by a worker: nothing is published, and nothing holds it.
    open_call(field .. 'state', 'asked')
    add_event(KEYS[5], ARGV[5], 'run.waiting', step, call, ARGV[at + 2])
    asked = true
  else
    local name, limits = ARGV[at + 7], ARGV[at + 9]
    started, used[name] = started + 1, (used[name] or 0) + 1
    if limits ~= '' then
      redis.call('HSET', KEYS[3], field .. 'limits', limits)
    end
    local digest, patience = string.match(ARGV[at + 8], '^approval (%x+) (%d+)$')
    local state = 'held'
    local full
    if digest then
      -- Takes nobody's place meanwhile: its siblings run on.
      state = 'approval'
      patience = tonumber(patience)
      redis.call('HSET', KEYS[3], field .. 'digest', digest,
        field .. 'decide_by', patience > 0 and now + patience or 0)
      if patience > 0 then
        decide_by = math.min(decide_by, now + patience)
      end
      asked = true
    elseif free > 0 then
      state = 'queued'
      free = free - 1
      if limits ~= '' then
        local order = int(arrival + index)
        full = join_queues(places, limits, ARGV[1] .. '.' .. call, order)
        redis.call('HSET', KEYS[3], field .. 'order', order)
      end
      if full then
        state = 'parked'
        moving = true
      else
        hints[#hints + 1] = index
      end
    end
    held_back = held_back or state == 'held'
    open_call(field .. 'state', state, field .. 'hinted', now, field .. 'hints', 1)
    if digest then
      add_event(KEYS[5], ARGV[5], 'approval.requested', step, call, ARGV[at + 2])
    else
      add_event(KEYS[5], ARGV[5], 'call.queued', step, call, ARGV[at + 2])
    end
    if full then
      redis.call('HSET', KEYS[3], field .. 'waits', 1)
      add_event(KEYS[5], ARGV[5], 'call.waiting', step, call, '{"reason":"LIMIT","limit":"' .. full .. '"}')
    end
  end
end
redis.call('HSET', KEYS[3], 'parallel', ARGV[6], 'at_once', (asked or held_back) and 0 or 1)
if started > 0 then
  redis.call('HINCRBY', KEYS[1], 'tool_calls', started)
end
for name, times in pairs(used) do
  redis.call('HINCRBY', KEYS[1], 'used.' .. name, times)
end
if asked and #hints == 1 and not moving then
  -- There is no hint to be lost: nobody has to look before the time of somebody who is to act is over.
  redis.call('HSET', KEYS[1], 'status', 'waiting')
  redis.call('ZADD', KEYS[7], int(decide_by), ARGV[1])
  pack_events(KEYS[5])
end
if ENVELOPES then
  for at = 2, #hints do
    send_hint(ARGV[1] .. '.' .. step .. '.' .. hints[at])
  end
  hints = {'OK'}
end
return with_granted(hints, granted)
