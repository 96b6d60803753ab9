-- begin_step: takes the epoch and the lease of a step's next attempt, if the step may be tried at all.
-- KEYS[1] run HASH
-- KEYS[2] events STREAM
-- KEYS[3] seen STRING
-- KEYS[4] suspect STRING
-- KEYS[5] due ZSET
-- KEYS[6] messages LIST
-- KEYS[7] inbox LIST
-- ARGV[1] step number
-- ARGV[2] lease in ms
-- ARGV[3] max_deaths of attempts in one step
-- ARGV[4] max_events kept in the stream
-- ARGV[5] attempt id, so that the same request sent twice gets the same answer
-- ARGV[6] schema that the worker can read
-- ARGV[7] process that the attempts of this worker start with
-- ARGV[8] id of the run
-- ARGV[9] known messages of the history, from its start
-- ARGV[10] created: when the run was that these are of
-- Returns OK | STALE | CANCELLED | FAILED | ANSWERED | EXPIRED | CAPPED | EXHAUSTED | BUSY | POISONED | NEWER, with now and the record; OK with 1 where the known messages stand, and those behind them, or else all
local step = ARGV[1]
local refused, attempt, created, fatal, final = refuse(
  KEYS[1], step, 'model', 'attempt', 'created', 'fatal', 'final')
if refused then
  return refused
end
local schema, deadline, max_steps, max_tokens, tokens, max_cost, cost = numbers(
  KEYS[1], 'schema', 'deadline', 'max_steps', 'max_tokens', 'total_tokens', 'max_cost', 'cost')
if schema > tonumber(ARGV[6]) then
  return {'NEWER'}
end
local function answer(word)
  return {word, int(now), redis.call('HGETALL', KEYS[1])}
end
local function hand_out()
  local stands = created == ARGV[10] and tonumber(ARGV[9]) <= redis.call('LLEN', KEYS[6])
  local tail = redis.call('LRANGE', KEYS[6], stands and ARGV[9] or 0, -1)
  return {'OK', int(now), redis.call('HGETALL', KEYS[1]), stands and '1' or '0', tail}
end
if attempt == ARGV[5] then
  return hand_out()
end
if fatal then
  return answer('FAILED')
end
if final then
  return answer('ANSWERED')
end
local epoch, not_before, lease, deaths, hinted, hints = numbers(
  KEYS[1], 'epoch', 'not_before', 'lease', 'deaths', 'hinted', 'hints')
if now >= deadline then
  return answer('EXPIRED')
end
if max_steps > 0 and tonumber(step) >= max_steps then
  return answer('CAPPED')
end
if max_tokens > 0 and tokens >= max_tokens or max_cost > 0 and cost >= max_cost then
  return answer('EXHAUSTED')
end
if now < not_before or now < lease then
  return {'BUSY'}
end
local last_try = deaths + (lease > 0 and 1 or 0) == ARGV[3] - 1
if last_try then
  -- Did it kill its worker, or did a neighbour in the same process? Its last attempt is made without
  -- another suspect beside it, so that a step that kills takes no innocent one with it.
  local other = redis.call('GET', KEYS[4])
  if other and other ~= KEYS[1] and numbers(other, 'lease') > now
      and string.find(redis.call('HGET', other, 'attempt') or '', ARGV[7], 1, true) == 1 then
    redis.call('HSET', KEYS[1], 'not_before', now + 1000)
    redis.call('ZADD', KEYS[5], now + 1000, ARGV[8])
    return {'BUSY'}
  end
  redis.call('SET', KEYS[4], KEYS[1], 'PX', int(deadline - now))
end
if lease > 0 then
  -- The last attempt neither committed nor let go: its holder died, or is as good as dead.
  deaths = redis.call('HINCRBY', KEYS[1], 'deaths', 1)
  add_event(KEYS[2], ARGV[4], 'run.recovered', step, '', '{}')
end
if deaths >= tonumber(ARGV[3]) then
  return answer('POISONED')
end
note_seen(KEYS[3], hinted, hints)
take_inbox(KEYS[7], KEYS[6])
redis.call('HSET', KEYS[1], 'status', 'running', 'epoch', epoch + 1, 'attempt', ARGV[5], 'hints', 1,
  'lease', now + tonumber(ARGV[2]))
add_event(KEYS[2], ARGV[4], 'step.started', step, '', '{"attempt":' .. int(deaths + 1) .. '}')
return hand_out()
