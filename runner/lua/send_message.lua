-- send_message: keeps what a user says to a run that hasn't ended; the next step that begins takes it
-- into the history, so that it never stands inside of a block.
-- KEYS[1] run HASH
-- KEYS[2] inbox LIST
-- KEYS[3] sent SET
-- KEYS[4] events STREAM
-- ARGV[1] operation id, so that the same request sent twice is one message
-- ARGV[2] message as JSON
-- ARGV[3] max_waiting messages at once
-- ARGV[4] max_events kept in the stream
-- ARGV[5] event data as JSON
-- Returns OK | DUPLICATE | BUSY | STALE | CANCELLED
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'STALE'}
end
if redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 1 then
  return {'DUPLICATE'}
end
local refused = refuse(KEYS[1])
if refused then
  return refused
end
if redis.call('LLEN', KEYS[2]) >= tonumber(ARGV[3]) then
  return {'BUSY'}
end
redis.call('RPUSH', KEYS[2], ARGV[2])
redis.call('SADD', KEYS[3], ARGV[1])
add_event(KEYS[4], ARGV[4], 'run.message', '', '', ARGV[5])
return {'OK'}
