-- add_event: one entry for whoever follows the run (progress of a tool); never brings a run back.
-- KEYS[1] run HASH
-- KEYS[2] events STREAM
-- ARGV[1] type of the event
-- ARGV[2] step number, or empty
-- ARGV[3] call id, or empty
-- ARGV[4] data as JSON
-- ARGV[5] max_events kept in the stream
-- ARGV[6] epoch of the attempt that tells it, or empty
-- Returns OK | STALE
local status, epoch = unpack(redis.call('HMGET', KEYS[1], 'status', 'epoch'))
if not status or status == 'finished' or ARGV[6] ~= '' and ARGV[6] ~= epoch then
  return {'STALE'}
end
add_event(KEYS[2], ARGV[5], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return {'OK'}
