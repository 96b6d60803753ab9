-- decide_call: lets a call run that waits for an approval, once, and with the arguments that were shown.
-- A call that is denied gets its result by record_result, on the same terms.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- KEYS[3] events STREAM
-- KEYS[4] due ZSET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] index of the call in its step
-- ARGV[4] digest of the arguments that were shown
-- ARGV[5] grace in ms
-- ARGV[6] max_events kept in the stream
-- ARGV[7] operation id, so that the same request sent twice gets the same answer
-- ARGV[8] decision as JSON, which is the event's data too
-- Returns OK | ALREADY | DECIDED | STALE | CANCELLED | EXPIRED | FENCED, with the index of the call where its hint is to be published
local step, index = ARGV[2], ARGV[3]
local call, field = step .. '.' .. index, index .. '.'
local decision = ARGV[7] .. ' ' .. ARGV[8]
local known, digest = unpack(redis.call('HMGET', KEYS[2], field .. 'state', field .. 'digest'))
local decided = redis.call('HGET', KEYS[1], 'decided.' .. call)
if decided == decision then
  return {'ALREADY', not ENVELOPES and known == 'queued' and index or nil}
end
if decided then
  -- Looked at before all else: what was decided stays true after the step and the run.
  return {'DECIDED'}
end
local refused = refuse(KEYS[1], step, 'tools')
if refused then
  return refused
end
if known ~= 'approval' then
  return {'STALE'}
end
local decide_by, parallel = numbers(KEYS[2], field .. 'decide_by', 'parallel')
local deadline, count = numbers(KEYS[1], 'deadline', 'calls')
if now >= deadline or decide_by > 0 and now >= decide_by then
  return {'EXPIRED'}
end
if digest ~= ARGV[4] then
  return {'FENCED'}
end
local flying = 0
for other = 0, count - 1 do
  local at = redis.call('HGET', KEYS[2], other .. '.state')
  flying = flying + ((at == 'queued' or at == 'running' or at == 'parked') and 1 or 0)
end
local state = 'held'
if flying < parallel then
  state = 'queued'
end
redis.call('HSET', KEYS[2], field .. 'state', state, field .. 'hinted', int(now), field .. 'hints', 1)
redis.call('HSET', KEYS[1], 'decided.' .. call, decision, 'status', 'running')
redis.call('ZADD', KEYS[4], 'LT', int(now + tonumber(ARGV[5])), ARGV[1])
add_event(KEYS[3], ARGV[6], 'approval.decided', step, call, ARGV[8])
if state == 'queued' then
  return with_hint('OK', ARGV[1] .. '.' .. call, index)
end
return {'OK'}
