-- What every transition shares. Redis' own clock is the only clock: skew between workers is harmless.
local function int(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

local function add_event(events, cap, kind, step, call, data)
  redis.call('XADD', events, 'MAXLEN', '~', cap, '*',
    'at', int(now), 'type', kind, 'step', step, 'call', call, 'data', data)
end

local function add_usage(run, requests, prompt, completion, total, unknown, cost)
  redis.call('HINCRBY', run, 'requests', requests)
  redis.call('HINCRBY', run, 'prompt_tokens', prompt)
  redis.call('HINCRBY', run, 'completion_tokens', completion)
  redis.call('HINCRBY', run, 'total_tokens', total)
  redis.call('HINCRBY', run, 'unknown_usage', unknown)
  redis.call('HINCRBY', run, 'cost', cost)
end

-- Numbers of a record, 0 where the field is missing.
local function numbers(hash, ...)
  local values = redis.call('HMGET', hash, ...)
  for i, value in ipairs(values) do
    values[i] = tonumber(value or '') or 0
  end
  return unpack(values)
end

-- Why a holder has no say (any more): its run is gone or has ended, or is no longer at that step and in
-- that phase (either may be nil, for a holder that an epoch identifies). Nil where it has.
local function refuse(run, step, phase)
  local status, at, number, stop = unpack(
    redis.call('HMGET', run, 'status', 'phase', 'step', 'stop_reason'))
  if not status then
    return {'STALE'}
  end
  if status == 'finished' then
    return {stop == 'CANCELLED' and 'CANCELLED' or 'STALE'}
  end
  if step and (number ~= step or at ~= phase) then
    return {'STALE'}
  end
end

-- Tells followers of budgets that are nearly used up, where there is something to tell.
local function warn_of_budgets(events, cap, step, data)
  if data ~= '' then
    add_event(events, cap, 'budget.warning', step, '', data)
  end
end

-- Keeps a run's idempotency key for at least `ttl` ms.
local function keep_key(run, id, ttl)
  local key = redis.call('HGET', run, 'idempotency')
  if key and redis.call('GET', key) == id and redis.call('PTTL', key) < ttl then
    redis.call('PEXPIRE', key, int(ttl))
  end
end

-- JSON is joined here, never parsed and encoded again: cjson would bend big integers and empty lists.
local function tool_message(id, content)
  return '{"role":"tool","tool_call_id":' .. id .. ',"content":' .. content .. '}'
end

-- Closes a block: every call's tool message, in call order, and the evidence found. A call without a
-- result gets `closer` as its content, so that no history ever holds an orphan. What a tool message
-- can't carry (images) follows the block as one user message.
local function append_results(messages, calls, evidence, count, closer)
  local parts = {}
  for i = 0, count - 1 do
    local call = redis.call('HMGET', calls, i .. '.id', i .. '.content', i .. '.evidence', i .. '.parts')
    redis.call('RPUSH', messages, tool_message(call[1], call[2] or closer))
    if call[3] then
      redis.call('RPUSH', evidence, call[3])
    end
    parts[#parts + 1] = call[4] or nil
  end
  if #parts > 0 then
    redis.call('RPUSH', messages, '{"role":"user","content":[' .. table.concat(parts, ',') .. ']}')
  end
end
