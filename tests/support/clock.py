"""Lets time pass for a store without anybody waiting: all that Redis knows gets older at once."""

from __future__ import annotations

from typing import Any

from runner.record import ms

# Whatever is near the clock is a time: in ms, or in us for the order in which things arrived.
AGE = """
local by = tonumber(ARGV[1])
local clock = redis.call('TIME')
local now = clock[1] * 1000
local near = 1000 * 86400 * 1000
local function older(text)
  local number = tonumber(text)
  if number and math.abs(number - now) < near then
    return string.format('%.0f', number - by)
  elseif number and math.abs(number - now * 1000) < near * 1000 then
    return string.format('%.0f', number - by * 1000)
  end
end
for _, key in ipairs(redis.call('KEYS', 'celeriac:*')) do
  local left, kind = redis.call('PTTL', key), redis.call('TYPE', key).ok
  if left >= 0 and left <= by then
    redis.call('DEL', key)
    kind = 'gone'
  end
  if kind == 'hash' then
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
      local at = older(fields[i + 1])
      if at then
        redis.call('HSET', key, fields[i], at)
      end
    end
  elseif kind == 'zset' then
    local members = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    for i = 1, #members, 2 do
      local at = older(members[i + 1])
      if at then
        redis.call('ZADD', key, at, members[i])
      end
    end
  elseif kind == 'string' then
    local at = older(redis.call('GET', key))
    if at then
      redis.call('SET', key, at, 'KEEPTTL')
    end
  end
  if left > by then
    redis.call('PEXPIRE', key, left - by)
  end
end
"""


def let_pass(redis: Any, seconds: float) -> None:
    """As if `seconds` had gone by: leases, deadlines, claims and TTLs are that much nearer.

    Of the server's keys only ours; at most some years in all.
    """
    redis.eval(AGE, 0, ms(seconds))
