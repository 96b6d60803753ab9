-- claim_due: moves what is due forward by a claim and hands it out, so that any number of workers can
-- recover side by side, and one that dies with a claim in hand delays it only by that claim.
-- KEYS[1] due ZSET
-- ARGV[1] claim in ms
-- ARGV[2] limit of runs handed out at once
-- Returns OK, with the ids of the runs
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(now), 'LIMIT', 0, ARGV[2])
for _, id in ipairs(ids) do
  redis.call('ZADD', KEYS[1], int(now + tonumber(ARGV[1])), id)
end
return {'OK', ids}
