-- record_result: the first result of a call wins, from whichever attempt it comes. The one that makes
-- the set complete appends all tool messages in call order and opens the next step.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] calls HASH
-- KEYS[4] results HASH
-- KEYS[5] evidence LIST
-- KEYS[6] events STREAM
-- KEYS[7] trace LIST
-- KEYS[8] due ZSET
-- KEYS[9] whole HASH
-- KEYS[10] slots ZSET, before the name of a limit
-- KEYS[11] waiting ZSET, before the name of a limit
-- KEYS[12] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] index of the call in its step
-- ARGV[4] grace in ms
-- ARGV[5] max_events kept in the stream
-- ARGV[6] result as JSON
-- ARGV[7] content of the tool message as a JSON string
-- ARGV[8] evidence as a JSON list, or empty
-- ARGV[9] fatal error of the run as JSON, or empty
-- ARGV[10] trace entry as JSON
-- ARGV[11] event data as JSON
-- ARGV[12] operation id, so that the same request sent twice gets the same answer
-- ARGV[13] failed name of the tool where it did, or empty
-- ARGV[14] final answer of the run as JSON, where the tool gives it, or empty
-- ARGV[15] parts of a message as JSON, that follow the block (images), or empty
-- ARGV[16] waits: the state that the call must be in, for a result that no attempt brings, or empty
-- ARGV[17] decision against the call as JSON, which is the event's data too, or empty
-- ARGV[18] digest of the arguments that were shown, or empty
-- ARGV[19] whole text of a result that was cut for the model, or empty
-- Returns WAIT | LAST | DUPLICATE | STALE | FENCED | DECIDED, with the index of a held call whose turn has come or the number of the next step, where its hint is to be published
local status, phase, step, count, closed_by = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'phase', 'step', 'calls', 'closed_by'))
if not status then
  return {'STALE'}
end
local index = ARGV[3]
local field = index .. '.'
if closed_by == ARGV[12] then
  return {'LAST', not ENVELOPES and int(ARGV[2] + 1) or nil}
end
local recorded, turn, was, digest, limits, at_once = unpack(redis.call('HMGET', KEYS[3],
  field .. 'recorded_by', field .. 'turn', field .. 'state', field .. 'digest', field .. 'limits', 'at_once'))
if recorded == ARGV[12] then
  return {'WAIT', not ENVELOPES and turn or nil}
end
local call = ARGV[2] .. '.' .. index
local decision = ARGV[12] .. ' ' .. ARGV[17]
if ARGV[17] ~= '' then
  local decided = redis.call('HGET', KEYS[1], 'decided.' .. call)
  if decided then
    return {decided == decision and 'WAIT' or 'DECIDED'}
  end
end
local open = status ~= 'finished' and step == ARGV[2] and phase == 'tools'
if not open or redis.call('HEXISTS', KEYS[4], index) == 1 then
  if ARGV[16] == '' then
    -- Too late to count, but the truth about a side effect is worth keeping.
    redis.call('RPUSHX', KEYS[7], string.sub(ARGV[10], 1, -2) .. ',"late":true}')
  end
  return {open and 'DUPLICATE' or 'STALE'}
end
if not was then
  return {'STALE'}
end
if ARGV[16] ~= '' and was ~= ARGV[16] or ARGV[18] ~= '' and digest ~= ARGV[18] then
  return {'FENCED'}
end
-- Whoever waited for a person held no place that a call that is held back could take.
local held_place = was ~= 'asked' and was ~= 'approval'
if ARGV[17] ~= '' then
  redis.call('HSET', KEYS[1], 'decided.' .. call, decision)
  add_event(KEYS[6], ARGV[5], 'approval.decided', step, call, ARGV[17])
end
redis.call('HSET', KEYS[4], index, ARGV[6])
local places = {run = KEYS[1], due = KEYS[8], slots = KEYS[10], waiting = KEYS[11], crowded = KEYS[12]}
local granted = {}
free_places(places, limits, ARGV[1] .. '.' .. call, granted)
redis.call('HSET', KEYS[3], field .. 'state', 'done', field .. 'content', ARGV[7],
  field .. 'recorded_by', ARGV[12])
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[3], field .. 'evidence', ARGV[8])
end
if ARGV[13] ~= '' then
  redis.call('HINCRBY', KEYS[1], 'failed.' .. ARGV[13], 1)
end
if ARGV[14] ~= '' then
  redis.call('HSET', KEYS[3], field .. 'final', ARGV[14])
end
if ARGV[19] ~= '' then
  redis.call('HSET', KEYS[9], call, ARGV[19])
end
if ARGV[15] ~= '' then
  redis.call('HSET', KEYS[3], field .. 'parts', ARGV[15])
end
if ARGV[9] ~= '' then
  redis.call('HSETNX', KEYS[1], 'fatal', ARGV[9])
end
redis.call('RPUSH', KEYS[7], ARGV[10])
add_event(KEYS[6], ARGV[5], 'call.finished', step, call, ARGV[11])
if redis.call('HLEN', KEYS[4]) < tonumber(count) then
  local asked, moving = false, false
  -- Where all went out at once, none is held back or waits for a person, and there is no need to look.
  for next = 0, at_once == '1' and -1 or count - 1 do
    local state = redis.call('HGET', KEYS[3], next .. '.state')
    asked = asked or state == 'asked' or state == 'approval'
    moving = moving or state == 'queued' or state == 'running' or state == 'held' or state == 'parked'
    if state == 'held' and held_place then
      redis.call('HSET', KEYS[3], next .. '.state', 'queued', next .. '.hinted', now)
      redis.call('ZADD', KEYS[8], 'LT', now + tonumber(ARGV[4]), ARGV[1])
      redis.call('HSET', KEYS[3], field .. 'turn', next)
      return with_granted(with_hint('WAIT', ARGV[1] .. '.' .. step .. '.' .. next, next), granted)
    end
  end
  if asked and not moving then
    redis.call('HSET', KEYS[1], 'status', 'waiting')
  end
  return with_granted({'WAIT'}, granted)
end
-- Of several answers the first call's counts, in whatever order they came.
local final = append_results(KEYS[2], KEYS[3], KEYS[5], count, '')
if final then
  redis.call('HSETNX', KEYS[1], 'final', final)
end
redis.call('DEL', KEYS[3], KEYS[4])
local following = int(step + 1)
redis.call('HSET', KEYS[1], 'step', following, 'phase', 'model', 'calls', 0, 'status', 'queued',
  'hinted', now, 'hints', 1, 'closed_by', ARGV[12])
redis.call('ZADD', KEYS[8], now + tonumber(ARGV[4]), ARGV[1])
return with_granted(with_hint('LAST', ARGV[1] .. '.' .. following, following), granted)
