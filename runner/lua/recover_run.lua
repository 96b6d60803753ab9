-- recover_run: looks at one due run and says which hints are lost; sets when to look again.
-- A hint is lost when its queue is empty, when a younger one was acted on, or when its holder died.
-- One that merely waits in a deep queue is left there, and looked at less and less often.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- KEYS[3] due ZSET
-- KEYS[4] steps_seen STRING
-- KEYS[5] tools_seen STRING
-- KEYS[6] steps_queue LIST, where the broker is this Redis
-- KEYS[7] tools_queue LIST, likewise
-- KEYS[8] runs ZSET
-- KEYS[9] messages LIST
-- KEYS[10] waiting ZSET, before the name of a limit
-- KEYS[11] crowded SET
-- KEYS[12] events STREAM
-- ARGV[1] id of the run
-- ARGV[2] grace in ms
-- ARGV[3] max_wait in ms between two looks
-- ARGV[4] steps_waiting in a queue that is elsewhere, or empty
-- ARGV[5] tools_waiting likewise
-- Returns STALE | DELIVER | EXPIRED | UNDECIDED | STEP | CALLS | WAIT | BUSY, with the step and the indexes of its calls, or (EXPIRED) now and the record, or (BUSY) the run that it is to interrupt
local function is_in(list, value)
  for _, each in ipairs(redis.call('LRANGE', list, 0, -1)) do
    if each == value then
      return true
    end
  end
  return false
end

local status, phase, step, count = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'phase', 'step', 'calls'))
local grace, max_wait = tonumber(ARGV[2]), tonumber(ARGV[3])
if status == 'finished' and redis.call('HGET', KEYS[1], 'promised') == '1' then
  local tries = redis.call('HINCRBY', KEYS[1], 'deliveries', 1)
  redis.call('ZADD', KEYS[3], int(now + math.min(grace * 2 ^ (tries - 1), max_wait)), ARGV[1])
  return {'DELIVER'}
end
if not status or status == 'finished' then
  redis.call('ZREM', KEYS[3], ARGV[1])
  if not status then
    redis.call('ZREM', KEYS[8], ARGV[1])
  end
  return {'STALE'}
end
if phase == 'parked' then
  -- It waits for its turn in a conversation, which the end of the run in front gives it.
  local conversation, interrupts = unpack(
    redis.call('HMGET', KEYS[1], 'conversation_key', 'interrupts'))
  local first = redis.call('LINDEX', conversation, 0)
  local first_run = first and key_of(KEYS[1], ARGV[1], first, KEYS[1])
  if first and first ~= ARGV[1] and is_live(first_run) then
    if not is_in(conversation, ARGV[1]) then
      redis.call('RPUSH', conversation, ARGV[1])
    end
    local busy = interrupts == first
    redis.call('ZADD', KEYS[3], int(now + (busy and grace or max_wait)), ARGV[1])
    return busy and {'BUSY', first} or {'WAIT', step}
  end
  -- It lost its place, or nobody is in front any more: it begins, with the history that is left.
  redis.call('LREM', conversation, 0, ARGV[1])
  if first and first ~= ARGV[1] then
    redis.call('LPOP', conversation)
    follow_history(KEYS[1], KEYS[9], first, key_of(KEYS[1], ARGV[1], first, KEYS[9]))
  end
  redis.call('LPUSH', conversation, ARGV[1])
  redis.call('PERSIST', conversation)
  redis.call('HSET', KEYS[1], 'status', 'queued', 'phase', 'model', 'hinted', int(now), 'hints', 1,
    'begins', int(now), 'deadline', int(now + numbers(KEYS[1], 'timeout')))
  redis.call('ZADD', KEYS[3], int(now + grace), ARGV[1])
  return {'STEP', step}
end
local deadline = numbers(KEYS[1], 'deadline')
if now >= deadline then
  return {'EXPIRED', int(now), redis.call('HGETALL', KEYS[1])}
end

-- Returns whether to publish a hint (again), and when to look next.
local function look(hash, field, seen, queue, elsewhere)
  local lease, not_before, hinted, hints = numbers(
    hash, field .. 'lease', field .. 'not_before', field .. 'hinted', field .. 'hints')
  if now < lease then
    return false, lease
  end
  if now < not_before then
    return false, not_before
  end
  local age = now - hinted
  local fresh = hinted > lease and hinted >= not_before
  if fresh then
    local patience = math.min(grace * 2 ^ (hints - 1), max_wait)
    if age < patience then
      return false, hinted + patience
    end
    local waiting = (tonumber(elsewhere) or redis.call('LLEN', queue)) > 0
    local overtaken = hinted + 1000 < tonumber(redis.call('GET', seen) or 0)
    if waiting and not overtaken then
      return false, now + math.min(math.max(age, grace), max_wait)
    end
  end
  redis.call('HSET', hash, field .. 'hinted', int(now))
  redis.call('HINCRBY', hash, field .. 'hints', 1)
  return true, now + math.min(grace * 2 ^ (fresh and hints or 0), max_wait)
end

local answer, again
local latest = deadline
local undecided = {'UNDECIDED', step}
if phase == 'tools' then
  for i = 0, count - 1 do
    local decide_by = numbers(KEYS[2], i .. '.decide_by')
    if redis.call('HGET', KEYS[2], i .. '.state') == 'approval' and decide_by > 0 then
      latest = math.min(latest, decide_by)
      if now >= decide_by then
        undecided[#undecided + 1] = i
      end
    end
  end
end
if #undecided > 2 then
  -- The claim on the run covers what follows; then somebody looks again.
  return undecided
end
if phase == 'model' then
  local lost
  lost, again = look(KEYS[1], '', KEYS[4], KEYS[6], ARGV[4])
  answer = {lost and 'STEP' or 'WAIT', step}
else
  answer, again = {'WAIT', step}, latest
  for i = 0, count - 1 do
    local state = redis.call('HGET', KEYS[2], i .. '.state')
    if state == 'queued' or state == 'running' then
      local lost, look_at = look(KEYS[2], i .. '.', KEYS[5], KEYS[7], ARGV[5])
      again = math.min(again, look_at)
      if lost then
        answer[1] = 'CALLS'
        answer[#answer + 1] = i
      end
    elseif state == 'parked' then
      -- Its place in a queue is its claim: grant_slots gives it its turn. Without one it has to ask again.
      local stands = false
      for name in each_limit(redis.call('HGET', KEYS[2], i .. '.limits')) do
        if redis.call('ZSCORE', KEYS[10] .. name, ARGV[1] .. '.' .. step .. '.' .. i) then
          redis.call('SADD', KEYS[11], name)
          redis.call('PEXPIRE', KEYS[11], QUEUE_TTL)
          stands = true
        end
      end
      again = math.min(again, now + (stands and max_wait or grace))
      if not stands then
        redis.call('HSET', KEYS[2], i .. '.state', 'queued', i .. '.hinted', int(now), i .. '.hints', 1)
        answer[1] = 'CALLS'
        answer[#answer + 1] = i
      end
    end
  end
end
if phase == 'tools' and again == latest then
  pack_events(KEYS[12])  -- it waits for a person
end
redis.call('ZADD', KEYS[3], int(math.min(again, deadline)), ARGV[1])
return answer
