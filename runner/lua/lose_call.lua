-- lose_call: the parent of a pool says that the child which held a call is gone, by death or by a stop.
-- KEYS[1] run HASH
-- KEYS[2] calls HASH
-- KEYS[3] due ZSET
-- KEYS[4] slots ZSET, before the name of a limit
-- KEYS[5] waiting ZSET, before the name of a limit
-- KEYS[6] crowded SET
-- ARGV[1] id of the run
-- ARGV[2] step number
-- ARGV[3] index of the call in its step
-- ARGV[4] holder, the beginning of the attempt ids of that child
-- ARGV[5] grace in ms
-- ARGV[6] max_releases of one call that cost no attempt, 0 where the child died
-- Returns OK | LOST | POISONED | STALE | CANCELLED | FENCED, with now, the call's decision, starts and epoch, and what it is told of its run
local step = ARGV[2]
local refused = refuse(KEYS[1], step, 'tools')
if refused then
  return refused
end
local field = ARGV[3] .. '.'
local state, attempt, decision = unpack(
  redis.call('HMGET', KEYS[2], field .. 'state', field .. 'attempt', field .. 'decision'))
if state ~= 'running' or string.sub(attempt, 1, #ARGV[4]) ~= ARGV[4] then
  return {'FENCED'}
end
local starts, started, releases, epoch = numbers(
  KEYS[2], field .. 'starts', field .. 'started', field .. 'releases', field .. 'epoch')
if starts > 1 and releases < tonumber(ARGV[6]) then
  redis.call('HINCRBY', KEYS[2], field .. 'releases', 1)
  started = redis.call('HINCRBY', KEYS[2], field .. 'started', -1)
end
if started >= starts then
  return answer_call(starts > 1 and 'POISONED' or 'LOST', KEYS[1], decision, started, epoch)
end
local places = {run = KEYS[1], due = KEYS[3], slots = KEYS[4], waiting = KEYS[5], crowded = KEYS[6]}
local granted = {}
local holder = ARGV[1] .. '.' .. step .. '.' .. ARGV[3]
free_places(places, redis.call('HGET', KEYS[2], field .. 'limits'), holder, granted)
redis.call('HSET', KEYS[2], field .. 'state', 'queued', field .. 'lease', 0,
  field .. 'hinted', int(now), field .. 'hints', 1)
redis.call('ZADD', KEYS[3], 'LT', int(now + tonumber(ARGV[5])), ARGV[1])
return with_granted({'OK'}, granted)
