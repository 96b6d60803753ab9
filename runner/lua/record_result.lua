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
-- KEYS[9] slots ZSET, before the name of a limit
-- KEYS[10] waiting ZSET, before the name of a limit
-- KEYS[11] crowded SET
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
-- Returns WAIT | LAST | DUPLICATE | STALE, with the index of a held call whose turn has come
local status, phase, step, count = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'phase', 'step', 'calls'))
if not status then
  return {'STALE'}
end
local index = ARGV[3]
local field = index .. '.'
if redis.call('HGET', KEYS[1], 'closed_by') == ARGV[12] then
  return {'LAST'}
end
local recorded, turn = unpack(redis.call('HMGET', KEYS[3], field .. 'recorded_by', field .. 'turn'))
if recorded == ARGV[12] then
  return {'WAIT', turn or nil}
end
local open = status ~= 'finished' and step == ARGV[2] and phase == 'tools'
if not open or redis.call('HEXISTS', KEYS[4], index) == 1 then
  -- Too late to count, but the truth about a side effect is worth keeping.
  redis.call('RPUSHX', KEYS[7], ARGV[10])
  return {open and 'DUPLICATE' or 'STALE'}
end
if redis.call('HEXISTS', KEYS[3], field .. 'decision') == 0 then
  return {'STALE'}
end
redis.call('HSET', KEYS[4], index, ARGV[6])
local places = {run = KEYS[1], due = KEYS[8], slots = KEYS[9], waiting = KEYS[10], crowded = KEYS[11]}
local granted = {}
free_places(places, redis.call('HGET', KEYS[3], field .. 'limits'), ARGV[1] .. '.' .. step .. '.' .. index, granted)
redis.call('HSET', KEYS[3], field .. 'state', 'done', field .. 'content', ARGV[7],
  field .. 'recorded_by', ARGV[12])
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[3], field .. 'evidence', ARGV[8])
end
if ARGV[13] ~= '' then
  redis.call('HINCRBY', KEYS[1], 'failed.' .. ARGV[13], 1)
end
if ARGV[14] ~= '' then
  redis.call('HSETNX', KEYS[1], 'final', ARGV[14])
end
if ARGV[15] ~= '' then
  redis.call('HSET', KEYS[3], field .. 'parts', ARGV[15])
end
if ARGV[9] ~= '' then
  redis.call('HSETNX', KEYS[1], 'fatal', ARGV[9])
end
redis.call('RPUSH', KEYS[7], ARGV[10])
add_event(KEYS[6], ARGV[5], 'call.finished', step, step .. '.' .. index, ARGV[11])
if redis.call('HLEN', KEYS[4]) < tonumber(count) then
  local asked, moving = false, false
  for next = 0, count - 1 do
    local state = redis.call('HGET', KEYS[3], next .. '.state')
    asked = asked or state == 'asked'
    moving = moving or state == 'queued' or state == 'running' or state == 'parked'
    if state == 'held' then
      redis.call('HSET', KEYS[3], next .. '.state', 'queued', next .. '.hinted', int(now))
      redis.call('ZADD', KEYS[8], 'LT', int(now + tonumber(ARGV[4])), ARGV[1])
      redis.call('HSET', KEYS[3], field .. 'turn', next)
      return with_granted({'WAIT', next}, granted)
    end
  end
  if asked and not moving then
    redis.call('HSET', KEYS[1], 'status', 'waiting')
  end
  return with_granted({'WAIT'}, granted)
end
append_results(KEYS[2], KEYS[3], KEYS[5], count, '')
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('HINCRBY', KEYS[1], 'step', 1)
redis.call('HSET', KEYS[1], 'phase', 'model', 'calls', 0, 'status', 'queued', 'hinted', int(now), 'hints', 1)
redis.call('ZADD', KEYS[8], int(now + tonumber(ARGV[4])), ARGV[1])
redis.call('HSET', KEYS[1], 'closed_by', ARGV[12])
return with_granted({'LAST'}, granted)
