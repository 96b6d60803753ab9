-- sweep_runs: the invariant that no run can be forgotten: whatever hasn't ended is in `due`.
-- KEYS[1] runs ZSET
-- KEYS[2] due ZSET
-- Returns OK, with the number of runs that were put back
local back = 0
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '+inf', '+inf')
for first = 1, #ids, 1000 do
  local chunk = {unpack(ids, first, math.min(first + 999, #ids))}
  for at, score in ipairs(redis.call('ZMSCORE', KEYS[2], unpack(chunk))) do
    if not score then
      back = back + redis.call('ZADD', KEYS[2], 'NX', int(now), chunk[at])
    end
  end
end
return {'OK', back}
