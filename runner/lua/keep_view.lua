-- keep_view: the holder of a step notes which part of the history its model is shown, for later steps.
-- KEYS[1] run HASH
-- KEYS[2] view STRING
-- ARGV[1] epoch of the holder
-- ARGV[2] view as JSON
-- Returns OK | STALE | FENCED | CANCELLED
local refused = refuse(KEYS[1])
if refused then
  return refused
end
local phase, epoch = unpack(redis.call('HMGET', KEYS[1], 'phase', 'epoch'))
if epoch ~= ARGV[1] or phase ~= 'model' then
  return {'FENCED'}
end
redis.call('SET', KEYS[2], ARGV[2])
return {'OK'}
