-- delete_run: removes an ended run and what points to it; whoever still holds something of it is `STALE`.
-- KEYS[1] run HASH
-- KEYS[2] messages LIST
-- KEYS[3] calls HASH
-- KEYS[4] results HASH
-- KEYS[5] evidence LIST
-- KEYS[6] events STREAM
-- KEYS[7] trace LIST
-- KEYS[8] inbox LIST
-- KEYS[9] sent SET
-- KEYS[10] due ZSET
-- KEYS[11] runs ZSET
-- KEYS[12] view STRING
-- KEYS[13] whole HASH
-- ARGV[1] id of the run
-- Returns OK | BUSY | STALE
local status, idempotency, conversation = unpack(
  redis.call('HMGET', KEYS[1], 'status', 'idempotency', 'conversation_key'))
if status and status ~= 'finished' then
  return {'BUSY'}
end
for i = 1, 9 do
  redis.call('DEL', KEYS[i])
end
redis.call('DEL', KEYS[12], KEYS[13])
redis.call('ZREM', KEYS[10], ARGV[1])
redis.call('ZREM', KEYS[11], ARGV[1])
if idempotency and redis.call('GET', idempotency) == ARGV[1] then
  redis.call('DEL', idempotency)
end
if conversation then
  redis.call('LREM', conversation, 0, ARGV[1])
end
return {status and 'OK' or 'STALE'}
