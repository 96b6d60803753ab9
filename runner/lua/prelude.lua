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

-- Appends one list to another, in pieces: `unpack` fails on thousands of elements.
local function append_list(from, to)
  for first = 0, redis.call('LLEN', from) - 1, 1000 do
    redis.call('RPUSH', to, unpack(redis.call('LRANGE', from, first, first + 999)))
  end
end

-- Moves what a user has sent meanwhile into the history. Only where no block is open.
local function take_inbox(inbox, messages)
  append_list(inbox, messages)
  redis.call('DEL', inbox)
end

-- The same key of another run: `run` is the key of the run `id`, and `key` one that belongs to it.
local function key_of(run, id, other, key)
  return string.sub(run, 1, #run - #id) .. other .. string.sub(key, #run + 1)
end

local function is_live(run)
  local status = redis.call('HGET', run, 'status')
  return status and status ~= 'finished'
end

-- Puts the history of `previous` in front of what a run was given. Its goal stays the last of these.
local function follow_history(run, messages, previous, previous_messages)
  local given = redis.call('LRANGE', messages, 0, -1)
  redis.call('DEL', messages)
  append_list(previous_messages, messages)
  for _, message in ipairs(given) do
    redis.call('RPUSH', messages, message)
  end
  redis.call('HSET', run, 'after', previous, 'goal', redis.call('LLEN', messages) - 1)
end

-- Lets the next run of a conversation begin, now that `id` has ended; answers its id, or nil. Its time
-- counts from here. Whoever calls this queues the run that it answers.
local function hand_on(conversation, run, messages, id, due, grace)
  while redis.call('LINDEX', conversation, 0) == id do
    local following = redis.call('LINDEX', conversation, 1)
    if not following then
      return nil
    end
    local following_run = key_of(run, id, following, run)
    if is_live(following_run) then
      redis.call('LPOP', conversation)
      follow_history(following_run, key_of(run, id, following, messages), id, messages)
      redis.call('HSET', following_run, 'phase', 'model', 'hinted', int(now), 'hints', 1, 'begins', int(now),
        'deadline', int(now + numbers(following_run, 'timeout')))
      redis.call('ZADD', due, int(now + grace), following)
      return following
    end
    redis.call('LREM', conversation, 1, following)
  end
end
