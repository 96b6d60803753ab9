-- take_call: records the result of a call as `record_result` does, and in the same write begins the call whose hint is next in the queue, as `begin_call` does.
-- Uses record_result, begin_call
-- KEYS[1] queue LIST
-- KEYS[2] taken STRING
-- KEYS[3] run HASH, before the id of a run
-- KEYS[4] seen STRING
-- KEYS[5] due ZSET
-- KEYS[6] slots ZSET, before the name of a limit
-- KEYS[7] waiting ZSET, before the name of a limit
-- KEYS[8] crowded SET
-- KEYS[9..] recording, those of record_result
-- ARGV[1] task of these hints
-- ARGV[2] kept_for in ms: how long it is known who has taken it
-- ARGV[3] lease in ms
-- ARGV[4] attempt id, so that the same request sent twice gets the same answer
-- ARGV[5] schema that the worker can read
-- ARGV[6] max_events kept in the stream
-- ARGV[7..] recording, those of record_result
-- Returns WAIT | LAST | DUPLICATE | STALE | FENCED | DECIDED, and the call that was taken with the answer of begin_call
local reply = record_result({unpack(KEYS, 9)}, {unpack(ARGV, 7)})
local holder = take_hint(KEYS[1], KEYS[2], ARGV[1], '[%w_-]+%.%d+%.%d+', ARGV[2], ARGV[4])
if holder then
  local id, step, index = string.match(holder, '^([^.]+)%.(%d+)%.(%d+)$')
  local run = KEYS[3] .. id
  local begun = begin_call(
    {run, run .. ':calls', run .. ':results', run .. ':events', KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[2]},
    {step, index, ARGV[3], ARGV[6], ARGV[4], ARGV[5], id, '0'})
  reply[#reply + 1] = {'taken', holder, begun}
end
return reply
