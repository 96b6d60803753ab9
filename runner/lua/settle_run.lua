-- settle_run: what a run promised at its end has been delivered; nothing is due any more.
-- KEYS[1] run HASH
-- KEYS[2] due ZSET
-- ARGV[1] id of the run
-- ARGV[2] resumed how often before the end that was delivered
-- Returns OK | STALE
local ended = redis.call('HGET', KEYS[1], 'status') == 'finished'
if not ended or numbers(KEYS[1], 'resumed') ~= tonumber(ARGV[2]) then
  return {'STALE'}
end
redis.call('HSET', KEYS[1], 'promised', 0)
redis.call('ZREM', KEYS[2], ARGV[1])
return {'OK'}
