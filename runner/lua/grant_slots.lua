-- grant_slots: gives places that are free again to what has waited longest for them, whoever let them go.
-- A slot whose holder died is free with its lease, a rate's with its period; nobody tells of either.
-- KEYS[1] run HASH, before the id of a run
-- KEYS[2] slots ZSET, before the name of a limit
-- KEYS[3] waiting ZSET, before the name of a limit
-- KEYS[4] crowded SET
-- KEYS[5] due ZSET
-- ARGV[1] limits looked at, at most
-- ARGV[2] longest wait in ms
-- Returns OK, with ms until the next place is free, at most the longest wait
local places = {run = KEYS[1], due = KEYS[5], slots = KEYS[2], waiting = KEYS[3], crowded = KEYS[4]}
local granted, soon = {}, tonumber(ARGV[2])
for _, name in ipairs(redis.call('SRANDMEMBER', places.crowded, ARGV[1])) do
  grant_places(places, name, granted, true)
  if redis.call('PEXPIRE', places.waiting .. name, QUEUE_TTL) == 1 then
    local first = redis.call('ZRANGE', places.slots .. name, 0, 0, 'WITHSCORES')
    soon = math.min(soon, math.max(0, (tonumber(first[2]) or now + soon) - now))
  end
end
redis.call('PEXPIRE', places.crowded, QUEUE_TTL)
return with_granted({'OK', int(soon)}, granted)
