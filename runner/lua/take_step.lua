-- take_step: commits a step as `commit_step` does, and in the same write takes the hint of the step that is next in the queue.
-- Uses commit_step
-- KEYS[1] queue LIST
-- KEYS[2] taken STRING
-- KEYS[3..] committing, those of commit_step
-- ARGV[1] task of these hints
-- ARGV[2] kept_for in ms: how long it is known who has taken it
-- ARGV[3] attempt id, so that the same request sent twice gets the same answer
-- ARGV[4..] committing, those of commit_step
-- Returns OK | ALREADY | STALE | FENCED | CANCELLED, and the step that was taken
local reply = commit_step({unpack(KEYS, 3)}, {unpack(ARGV, 4)})
local holder = take_hint(KEYS[1], KEYS[2], ARGV[1], '[%w_-]+%.%d+', ARGV[2], ARGV[3])
if holder then
  reply[#reply + 1] = {'taken', holder}
end
return reply
