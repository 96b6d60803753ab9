-- sweep_runs: the invariant that no run can be forgotten: whatever hasn't ended is in `due`.
-- KEYS[1] runs ZSET
-- KEYS[2] due ZSET
-- Returns OK, with the number of runs that were put back
local back = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '+inf', '+inf')) do
  back = back + redis.call('ZADD', KEYS[2], 'NX', int(now), id)
end
return {'OK', back}
