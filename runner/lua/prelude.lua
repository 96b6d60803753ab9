-- What every transition shares; a script has what it uses of these paragraphs.
-- A whole number as text, for a text or an answer. Commands take whole numbers as they are, which costs less.
local function int(number)
  return string.format('%.0f', number)
end

-- Redis' own clock is the only clock: skew between workers is harmless.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

-- Hints are put on their queues here, in the same write as what they are for, where those are in this very Redis:
-- then the store writes a function into this line, `ENVELOPES(run, step, index, tag)`, that answers the queue
-- and the Celery message of a step (its index is empty) or a call. Else whoever called is answered what to publish.
local ENVELOPES = nil

local function add_event(events, cap, kind, step, call, data)
  redis.call('XADD', events, 'MAXLEN', '~', cap, '*',
    'at', now, 'type', kind, 'step', step, 'call', call, 'data', data)
end

-- Gives back what Redis keeps free behind a short stream, up to 4 KB, for a run that is to rest: a copy is as long
-- as what it holds. Ids and marks stay, and so do readers that wait for more. In a long one it is no matter.
local function pack_events(events)
  if redis.call('XLEN', events) < 100 then
    local packed = events .. ':packed'
    redis.call('COPY', events, packed, 'REPLACE')
    redis.call('COPY', packed, events, 'REPLACE')
    redis.call('DEL', packed)
  end
end

-- Numbers of a record, 0 where the field is missing.
local function numbers(hash, ...)
  local values = redis.call('HMGET', hash, ...)
  for i, value in ipairs(values) do
    values[i] = tonumber(value or '') or 0
  end
  return unpack(values)
end

local function add_usage(run, requests, prompt, completion, total, unknown, cost)
  local before = {numbers(run, 'requests', 'prompt_tokens', 'completion_tokens', 'total_tokens', 'unknown_usage')}
  redis.call('HSET', run, 'requests', before[1] + requests, 'prompt_tokens', before[2] + prompt,
    'completion_tokens', before[3] + completion, 'total_tokens', before[4] + total,
    'unknown_usage', before[5] + unknown)
  if cost ~= '' then
    redis.call('HINCRBY', run, 'cost', cost)
  end
end

-- Why a holder has no say (any more): its run is gone or has ended, or is no longer at that step and in
-- that phase (either may be nil, for a holder that an epoch identifies). Nil where it has, and then the
-- values of these further fields of the record.
local function refuse(run, step, phase, ...)
  local fields = redis.call('HMGET', run, 'status', 'phase', 'step', 'stop_reason', ...)
  local status, at, number, stop = unpack(fields, 1, 4)
  if not status then
    return {'STALE'}
  end
  if status == 'finished' then
    return {stop == 'CANCELLED' and 'CANCELLED' or 'STALE'}
  end
  if step and (number ~= step or at ~= phase) then
    return {'STALE'}
  end
  return nil, unpack(fields, 5)
end

-- The answer to whoever begins a call, or takes it over from a holder that is gone: the call, and of its run what
-- it is told. The first name in a decision is that of its tool.
local function answer_call(word, run, decision, started, epoch)
  local tool = string.match(decision, '"name":"([^"]*)"') or ''
  return {word, int(now), decision, int(started), int(epoch), redis.call('HMGET', run, 'epoch', 'agent', 'deadline',
    'principal', 'metadata', 'resumed', 'failed.' .. tool)}
end

-- Notes that a hint was acted on, where it was the first for its work: a queue is first in, first out, so any
-- hint older than this one and still unseen is lost. Recovery allows for a second; to note each would be a
-- write for each.
local function note_seen(seen, hinted, hints)
  if hints == 1 and hinted > tonumber(redis.call('GET', seen) or 0) + 100 then
    redis.call('SET', seen, hinted)
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

-- Appends values to a list, in pieces: `unpack` fails on thousands of them.
local function push_all(list, values)
  for first = 1, #values, 1000 do
    redis.call('RPUSH', list, unpack(values, first, math.min(first + 999, #values)))
  end
end

-- Closes a block: every call's tool message, in call order, and the evidence found. A call without a
-- result gets `closer` as its content, so that no history ever holds an orphan. What a tool message
-- can't carry (images) follows the block as one user message. Answers the first call's final answer,
-- of those that gave one.
local function append_results(messages, calls, evidence, count, closer)
  local block, parts, final = {}, {}, nil
  for i = 0, count - 1 do
    local id, content, found, part, answer = unpack(redis.call(
      'HMGET', calls, i .. '.id', i .. '.content', i .. '.evidence', i .. '.parts', i .. '.final'))
    block[#block + 1] = tool_message(id, content or closer)
    if found then
      redis.call('RPUSH', evidence, found)
    end
    parts[#parts + 1] = part or nil
    final = final or answer or nil
  end
  if #parts > 0 then
    block[#block + 1] = '{"role":"user","content":[' .. table.concat(parts, ',') .. ']}'
  end
  push_all(messages, block)
  return final
end

-- Appends one list to another.
local function append_list(from, to)
  for first = 0, redis.call('LLEN', from) - 1, 1000 do
    push_all(to, redis.call('LRANGE', from, first, first + 999))
  end
end

-- Moves what a user has sent meanwhile into the history. Only where no block is open.
local function take_inbox(inbox, messages)
  if redis.call('EXISTS', inbox) == 1 then
    append_list(inbox, messages)
    redis.call('DEL', inbox)
  end
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
  push_all(messages, given)
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

-- Limits across the fleet are text: `ping=5` (so many at once), `rate.ping=10/1000` (so many starts in 1000 ms).
-- A place under one is an entry of `slots`, with the time from which it is free again: the end of its holder's
-- lease, or of the period in which its start counts. Who finds none stands in `waiting` by order of arrival, and
-- may start as soon as more places are free than others wait in front of it. So a free place is nobody's, and a
-- hint that is lost holds none. `places` has a run's key, `due`, and what the names of limits are put behind.
local arrival = int(tonumber(clock[1]) * 1000000 + tonumber(clock[2]))
local QUEUE_TTL = 3600000
local PATIENCE = 5000

-- Puts the hint of a holder, `<run>.<step>` or `<run>.<step>.<index>`, on its queue.
local function send_hint(holder)
  local id, step, index = string.match(holder, '^([^.]+)%.(%d+)%.?(%d*)$')
  redis.call('LPUSH', ENVELOPES(id, step, index, holder .. '.' .. arrival))
end

-- Takes the hint that is next in a queue off it, where it is one of this task and its id is like that of such a
-- hint; answers whose it is. Done twice by the same attempt, it is the same one.
local function take_hint(queue, taken, task, like, kept_for, attempt)
  local before, holder = string.match(redis.call('GET', taken) or '', '^(%S+) (%S+)$')
  if before == attempt then
    return holder
  end
  local message = redis.call('LINDEX', queue, -1) or ''
  holder = string.match(message, '"id": ?"(' .. like .. ')"')
  if not holder or #holder > 100 or string.match(message, '"task": ?"([%w._]+)"') ~= task then
    return nil
  end
  -- Written first: a Redis that is full refuses it, and the hint stays where it is.
  redis.call('SET', taken, attempt .. ' ' .. holder, 'PX', kept_for)
  redis.call('RPOP', queue)
  return holder
end

-- An answer whose hint, that of `holder`, is sent here, or left with its number to whoever asked.
local function with_hint(word, holder, number)
  if ENVELOPES then
    send_hint(holder)
    return {word}
  end
  return {word, number}
end

local function each_limit(limits)
  return string.gmatch(limits or '', '([^=,]+)=(%d+)/?(%d*)')
end

local function count_taken(places, name)
  redis.call('ZREMRANGEBYSCORE', places.slots .. name, '-inf', int(now))
  return redis.call('ZCARD', places.slots .. name)
end

local function hold_place(places, name, member, ends)
  local slots = places.slots .. name
  redis.call('ZADD', slots, int(ends), member)
  if redis.call('PTTL', slots) < ends - now then
    redis.call('PEXPIRE', slots, int(ends - now))
  end
end

-- Where a holder, `<run>.<step>` or `<run>.<step>.<index>`, keeps what is known of it: hash and prefix of its
-- fields, the id of its run, its state and its limits. Nil where it is no longer at that step.
local function find_holder(places, holder)
  local id, step, index = string.match(holder, '^([^.]+)%.(%d+)%.?(%d*)$')
  local run = string.match(places.run, '^(.*:)') .. id
  local status, at, phase, parked, limits = unpack(
    redis.call('HMGET', run, 'status', 'step', 'phase', 'parked', 'model_limits'))
  if not status or status == 'finished' or at ~= step or phase ~= (index == '' and 'model' or 'tools') then
    return nil
  end
  if index == '' then
    return run, '', id, parked or 'queued', limits
  end
  local calls, field = run .. ':calls', index .. '.'
  return calls, field, id, unpack(redis.call('HMGET', calls, field .. 'state', field .. 'limits'))
end

-- Gives what has waited longest for a limit its hint, as far as places are free; the hints join `granted`.
-- Looks at the last of those whose turn it is, whose turn has just come; `all` from the first on.
local function grant_places(places, name, granted, all)
  local waiting = places.waiting .. name
  for _ = 1, 8 do
    local first = redis.call('ZRANGE', waiting, 0, 0)[1]
    if not first then
      redis.call('SREM', places.crowded, name)
      return
    end
    local gone, free = {}, 0
    local hash, _, _, _, limits = find_holder(places, first)
    for limit, most in each_limit(limits) do
      if limit == name then
        free = tonumber(most) - count_taken(places, name)
      end
    end
    local from = all and 0 or math.max(0, free - 16)
    local heads = hash and free > 0 and redis.call('ZRANGE', waiting, from, math.min(free, from + 64) - 1)
    for _, holder in ipairs(heads or (hash and {} or {first})) do
      local at, prefix, id, state = find_holder(places, holder)
      if state == 'parked' then
        redis.call('HSET', at, prefix .. 'not_before', 0, prefix .. 'hinted', int(now), prefix .. 'hints', 1,
          prefix == '' and 'parked' or prefix .. 'state', 'queued')
        redis.call('ZADD', places.due, 'LT', int(now + 1000), id)
        granted[#granted + 1] = holder
      elseif state ~= 'queued' then
        gone[#gone + 1] = holder
      end
    end
    if #gone == 0 then
      return
    end
    redis.call('ZREM', waiting, unpack(gone))
  end
end

-- Which of these limits have no place for a holder that came at `order`, and the first of them.
local function find_full(places, limits, holder, start, order)
  local full, first = {}, nil
  for name, most, period in each_limit(limits) do
    local taken = count_taken(places, name)
    if not redis.call('ZSCORE', places.slots .. name, period == '' and holder or start) then
      local ahead = redis.call('ZCOUNT', places.waiting .. name, '-inf', int(order - 1))
      full[name] = taken + ahead >= tonumber(most)
      first = first or full[name] and name or nil
    end
  end
  return full, first
end

local function stand_in_queue(places, name, holder, order)
  redis.call('ZADD', places.waiting .. name, order, holder)
  redis.call('PEXPIRE', places.waiting .. name, QUEUE_TTL)
  redis.call('SADD', places.crowded, name)
  redis.call('PEXPIRE', places.crowded, QUEUE_TTL)
end

-- Puts a call that nobody has begun in its place in the queues, so that only those whose turn it is need a
-- hint. Answers the first limit that it has to wait for; nil where it has its turn.
local function join_queues(places, limits, holder, order)
  local full, first = find_full(places, limits, holder, '', order)
  for name in each_limit(limits) do
    if full[name] or not first then
      stand_in_queue(places, name, holder, order)
    end
  end
  return first
end

-- Takes a place under each of these limits until `ends`, or none at all: then the holder waits for those
-- that are full, and the first of them is the answer. `start` is unique to this attempt. Whoever has waited
-- for long keeps its turn under the others as well, or those that need fewer would pass it for ever.
local function take_places(places, limits, holder, start, order, ends, granted)
  local full, first = find_full(places, limits, holder, start, order)
  local waited = now - tonumber(order) / 1000
  for name, _, period in each_limit(limits) do
    if not first then
      hold_place(places, name, period == '' and holder or start, period == '' and ends or now + period)
      redis.call('ZREM', places.waiting .. name, holder)
    elseif full[name] or waited > PATIENCE then
      stand_in_queue(places, name, holder, order)
    elseif redis.call('ZREM', places.waiting .. name, holder) == 1 then
      -- It stood in the way of others here, and waits elsewhere now.
      grant_places(places, name, granted)
    end
  end
  return first
end

-- Renews a holder's places. False where one was taken meanwhile: then it may not go on.
local function keep_places(places, limits, holder, ends)
  for name, most, period in each_limit(limits) do
    local score = tonumber(redis.call('ZSCORE', places.slots .. name, holder) or 0)
    if period == '' and score <= now and count_taken(places, name) >= tonumber(most) then
      return false
    end
  end
  for name, _, period in each_limit(limits) do
    if period == '' then
      hold_place(places, name, holder, ends)
    end
  end
  return true
end

-- Gives a holder's places back, those in queues too. Only what it has: done twice, it frees nothing twice.
local function free_places(places, limits, holder, granted)
  for name, _, period in each_limit(limits) do
    local freed = redis.call('ZREM', places.waiting .. name, holder)
    if period == '' then
      freed = freed + redis.call('ZREM', places.slots .. name, holder)
    end
    if freed > 0 then
      grant_places(places, name, granted)
    end
  end
end

-- The places that a step holds at its model, and what the model's pace is told of it: the tokens that were
-- used, and for how many ms nobody is to ask. `keep` leaves the step its order of arrival.
local function leave_model(places, holder, tokens, pause, keep, granted)
  local limits, pace = unpack(redis.call('HMGET', places.run, 'model_limits', 'pace'))
  if pace then
    local per_minute, used, closed = numbers(pace, 'per_minute', 'used', 'closed')
    if per_minute > 0 then
      used = math.max(used, now) + tokens * 60000 / per_minute
    end
    closed = pause > 0 and math.max(closed, now + pause) or closed
    redis.call('HSET', pace, 'used', int(used), 'closed', int(closed))
    redis.call('PEXPIRE', pace, int(math.max(used, closed, now) - now + 60000))
    redis.call('HDEL', places.run, 'pace')
  end
  if limits then
    free_places(places, limits, holder, granted)
    redis.call('HDEL', places.run, 'parked', 'model_limits')
    if not keep then
      redis.call('HDEL', places.run, 'order')
    end
  end
end

-- An answer, with the hints of those that got their turn by it: sent here, or published by whoever asked.
local function with_granted(reply, granted)
  if ENVELOPES then
    for _, holder in ipairs(granted) do
      send_hint(holder)
    end
  elseif #granted > 0 then
    table.insert(granted, 1, 'granted')
    reply[#reply + 1] = granted
  end
  return reply
end

-- An answer for a run that has just got its record, with the hint of its first step: unless that it was created is
-- told elsewhere first, by whoever asked, and its hint is published after that.
local function with_first_step(reply, run, id)
  local backend, step = unpack(redis.call('HMGET', run, 'to_backend', 'step'))
  return backend == '1' and reply or with_granted(reply, {id .. '.' .. step})
end
