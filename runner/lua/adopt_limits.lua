-- adopt_limits: gives a run its agent's limits, where the client that submitted it didn't know them.
-- KEYS[1] run HASH
-- ARGV[1] id of the run
-- ARGV[2] retention in ms
-- ARGV[3] timeout in ms, from the run's creation, or from its turn in a conversation
-- ARGV[4..] fields of the record with their values
-- Returns OK | ALREADY | STALE, with now and the record
local status = redis.call('HGET', KEYS[1], 'status')
if not status or status == 'finished' then
  return {'STALE'}
end
local word = 'ALREADY'
if redis.call('HEXISTS', KEYS[1], 'limits') == 0 then
  word = 'OK'
  local created, begins = numbers(KEYS[1], 'created', 'begins')
  redis.call('HSET', KEYS[1], 'deadline', int(math.max(created, begins) + tonumber(ARGV[3])),
    unpack(ARGV, 4))
  keep_key(KEYS[1], ARGV[1], tonumber(ARGV[3]) + 2 * ARGV[2])
end
return {word, int(now), redis.call('HGETALL', KEYS[1])}
