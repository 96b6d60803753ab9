-- begin_call: takes the epoch and the lease of a call's next attempt, if the call may be started.
-- A call whose last holder died is started again only while it has starts left. One that finds no place under
-- one of its limits is parked until it has its turn.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- KEYS[3] results HASH
-- KEYS[4] events STREAM
-- KEYS[5] seen STRING
-- KEYS[6] due ZSET
-- KEYS[7] slots ZSET, before the name of a limit
-- KEYS[8] waiting ZSET, before the name of a limit
-- KEYS[9] crowded SET
-- KEYS[10] taken STRING
-- ARGV[1] step number
-- ARGV[2] index of the call in its step
-- ARGV[3] lease in ms
-- ARGV[4] max_events kept in the stream
-- ARGV[5] attempt id, so that the same request sent twice gets the same answer
-- ARGV[6] schema that the worker can read
-- ARGV[7] id of the run
-- ARGV[8] kept_for in ms: how long it is known who has taken its hint by itself, 0 where Celery has
-- Returns OK | STALE | CANCELLED | DUPLICATE | EXPIRED | BUSY | PARKED | LOST | POISONED | NEWER, with now, the call's decision, starts and epoch, and what it is told of its run
local step = ARGV[1]
local refused, schema, deadline = refuse(KEYS[1], step, 'tools', 'schema', 'deadline')
if refused then
  return refused
end
if tonumber(schema or 0) > tonumber(ARGV[6]) then
  return {'NEWER'}
end
local field = ARGV[2] .. '.'
local decision, state, attempt, limits, order, lease, not_before, starts, started, epoch, hinted, hints = unpack(
  redis.call('HMGET', KEYS[2], field .. 'decision', field .. 'state', field .. 'attempt', field .. 'limits',
    field .. 'order', field .. 'lease', field .. 'not_before', field .. 'starts', field .. 'started',
    field .. 'epoch', field .. 'hinted', field .. 'hints'))
if not decision then
  return {'STALE'}
end
if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then
  return {'DUPLICATE'}
end
starts, started, epoch = tonumber(starts or 0), tonumber(started or 0), tonumber(epoch or 0)
local function answer(word)
  return answer_call(word, KEYS[1], decision, started, epoch)
end
if attempt == ARGV[5] then
  return answer('OK')
end
if now >= tonumber(deadline or 0) then
  return answer('EXPIRED')
end
if state == 'held' or state == 'asked' or state == 'approval' or now < tonumber(lease or 0)
  or now < tonumber(not_before or 0) then
  return {'BUSY'}
end
if state == 'running' and started >= starts then
  -- Started as often as it may be, and nobody knows what the last start did.
  return answer(starts > 1 and 'POISONED' or 'LOST')
end
note_seen(KEYS[5], tonumber(hinted or 0), tonumber(hints or 0))
local ends, granted = now + tonumber(ARGV[3]), {}
if limits then
  local places = {run = KEYS[1], due = KEYS[6], slots = KEYS[7], waiting = KEYS[8], crowded = KEYS[9]}
  local holder = ARGV[7] .. '.' .. step .. '.' .. ARGV[2]
  local full = take_places(places, limits, holder, holder .. '#' .. (epoch + 1), order or arrival, ends, granted)
  redis.call('HSETNX', KEYS[2], field .. 'order', arrival)
  if full then
    redis.call('HSET', KEYS[2], field .. 'state', 'parked', field .. 'lease', 0)
    if redis.call('HSETNX', KEYS[2], field .. 'waits', 1) == 1 then
      add_event(KEYS[4], ARGV[4], 'call.waiting', step, step .. '.' .. ARGV[2],
        '{"reason":"LIMIT","limit":"' .. full .. '"}')
    end
    return with_granted({'PARKED'}, granted)
  end
end
if ARGV[8] ~= '0' then
  redis.call('SET', KEYS[10], ARGV[5] .. ' ' .. ARGV[7] .. '.' .. step .. '.' .. ARGV[2], 'PX', ARGV[8])
end
started, epoch = started + 1, epoch + 1
redis.call('HSET', KEYS[2], field .. 'state', 'running', field .. 'attempt', ARGV[5],
  field .. 'epoch', epoch, field .. 'started', started, field .. 'hints', 1, field .. 'lease', ends)
add_event(KEYS[4], ARGV[4], 'call.started', step, step .. '.' .. ARGV[2],
  '{"attempt":' .. int(started) .. '}')
return with_granted(answer('OK'), granted)
