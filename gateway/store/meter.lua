-- Arithmetic of one meter; the same numbers as policies/bucket.py, which is its oracle: what changes
-- here must change there. Loaded in front of every verb, after clock.lua. Touches no key by itself.
--
-- A quota comes as {name, rate, burst, requests, width, concurrency, daily tokens, daily cost};
-- -1 stands for "no such limit". A hint is {level (refilled since, beyond the burst), used today, spent
-- today, 1 if known}: what a gateway last saw, from which a meter is made that the server has lost.
-- State, one msgpack array per field of the tenant's hash:
local RATE, BURST, LEVEL, AT, RUNNING = 1, 2, 3, 4, 5
local DAY, USED, COST_DAY, COST = 6, 7, 8, 9
local WIDTH, LIMIT, SLOT, TOTAL, COUNTS, SPENT = 10, 11, 12, 13, 14, 15
local BORN, BORN_AT = 16, 17 -- the level the bucket was made with, and when
local OVERFLOW, OVERFLOW_END = 18, 19 -- tokens that found the bucket full, and until when they did
local STEP, SLACK, DAY_LENGTH, SLOTS = 1.0, 1e-6, 86400.0, 60
local SIZE = SLOTS + 1
local OPEN, EXPIRED, DONE = 0, 1, 2

local function day_of(now)
  return math.floor(now / DAY_LENGTH)
end

-- token bucket

local function refill(s, now)
  local elapsed = now - s[AT]
  if elapsed > 0 then
    local level = s[LEVEL] + elapsed * s[RATE]
    if level > s[BURST] then
      s[OVERFLOW], s[OVERFLOW_END] = s[OVERFLOW] + level - s[BURST], now
    end
    s[LEVEL] = math.min(level, s[BURST])
    s[AT] = now
  elseif elapsed < -STEP then
    s[AT] = now
  end
  return s[LEVEL]
end

local function bucket_holds(s, amount, now)
  local level = refill(s, now)
  return level >= amount - SLACK and level > 0
end

local function bucket_settle(s, back, now)
  s[LEVEL] = math.min(math.max(refill(s, now) + back, -s[BURST]), s[BURST])
end

local function bucket_wait(s, amount, now)
  local deficit = math.min(amount, s[BURST]) - refill(s, now)
  if deficit <= SLACK and s[LEVEL] > 0 then
    return amount <= s[BURST] + SLACK and 0 or nil
  end
  if s[RATE] <= 0 or amount > s[BURST] + SLACK then return nil end
  return math.max(deficit, SLACK) / s[RATE]
end

-- request window: a ring of SIZE counts

local function shift(s, slot)
  local aged = {}
  for age = 0, SIZE - 1 do aged[age] = s[COUNTS][(s[SLOT] - age) % SIZE + 1] end
  for age = 0, SIZE - 1 do s[COUNTS][(slot - age) % SIZE + 1] = aged[age] end
  s[SLOT] = slot
end

local function advance(s, now)
  local slot = math.floor(now / s[WIDTH])
  local ahead = slot - s[SLOT]
  if ahead > 0 then
    if ahead >= SIZE then
      for i = 1, SIZE do s[COUNTS][i] = 0 end
      s[TOTAL] = 0
    elseif s[TOTAL] > 0 then
      for old = s[SLOT] + 1, slot do
        local i = old % SIZE + 1
        s[TOTAL] = s[TOTAL] - s[COUNTS][i]
        s[COUNTS][i] = 0
      end
    end
    s[SLOT] = slot
  elseif ahead < 0 and -ahead * s[WIDTH] > STEP + s[WIDTH] then
    shift(s, slot)
  end
  return s[TOTAL]
end

local function count(s, n)
  local i = s[SLOT] % SIZE + 1
  s[COUNTS][i] = s[COUNTS][i] + n
  s[TOTAL] = s[TOTAL] + n
end

local function uncount(s, at, now)
  advance(s, now)
  local slot = math.min(math.floor(at / s[WIDTH]), s[SLOT])
  local i = slot % SIZE + 1
  if s[SLOT] - slot < SIZE and s[COUNTS][i] > 0 then
    s[COUNTS][i] = s[COUNTS][i] - 1
    s[TOTAL] = s[TOTAL] - 1
  end
end

local function window_wait(s, now)
  if advance(s, now) < s[LIMIT] then return 0 end
  if s[LIMIT] == 0 then return nil end
  local over = s[TOTAL] - s[LIMIT] + 1
  for age = SIZE - 1, 0, -1 do
    over = over - s[COUNTS][(s[SLOT] - age) % SIZE + 1]
    if over <= 0 then
      return math.max((s[SLOT] - age + SIZE) * s[WIDTH] - now, 0) + SLACK
    end
  end
  return nil
end

-- daily windows; `day` and `used` are the indices of the two numbers

local function new_day(s, day, used, now)
  local today = day_of(now)
  if today > s[day] then
    s[day], s[used] = today, 0
  elseif today < s[day] and s[day] * DAY_LENGTH - now > STEP then
    s[day] = today
  end
  return s[used]
end

local function daily_holds(s, day, used, limit, amount, now)
  local so_far = new_day(s, day, used, now)
  return so_far + amount <= limit + SLACK and so_far < limit
end

local function daily_settle(s, day, used, back, at, now)
  new_day(s, day, used, now)
  if back < 0 or day_of(at) >= s[day] then s[used] = math.max(s[used] - back, 0) end
end

local function daily_wait(s, day, now)
  return (s[day] + 1) * DAY_LENGTH - now
end

-- the whole meter

local function blank(now)
  return {-1, 0, 0, now, 0, day_of(now), 0, day_of(now), 0, -1, 0, 0, 0, {}, 0, 0, now, 0, now}
end

-- A meter fitted to its quota: made from the hint if `packed` is false, rescaled if limits changed.
local function fitted(packed, quota, hint, now)
  local s = packed and cmsgpack.unpack(packed) or blank(now)
  local rate, burst, requests, width = quota[2], quota[3], quota[4], quota[5]
  if rate >= 0 then
    if s[RATE] < 0 then
      local seen = hint and hint[1] or -1
      local known = hint and hint[4] == 1
      s[RATE], s[BURST], s[AT] = rate, burst, now
      s[BORN], s[BORN_AT] = known and math.max(seen, -burst) or burst, now
      s[LEVEL] = math.min(s[BORN], burst)
      s[OVERFLOW], s[OVERFLOW_END] = s[BORN] - s[LEVEL], now
    elseif s[RATE] ~= rate or s[BURST] ~= burst then
      refill(s, now)
      s[LEVEL] = s[BURST] > 0 and s[LEVEL] * burst / s[BURST] or 0
      s[RATE], s[BURST] = rate, burst
    end
  end
  if requests >= 0 then
    if s[WIDTH] < 0 then
      s[WIDTH], s[LIMIT], s[SLOT] = width, requests, math.floor(now / width)
      for i = 1, SIZE do s[COUNTS][i] = 0 end
    elseif s[WIDTH] ~= width or s[LIMIT] ~= requests then
      advance(s, now)
      s[WIDTH], s[LIMIT] = width, requests
      shift(s, math.floor(now / width))
    end
  end
  if not packed and hint and hint[4] == 1 then
    s[USED], s[COST] = math.max(hint[2], 0), math.max(hint[3], 0)
  end
  return s
end

-- Why the meter refuses, nil if it does not.
local function refusal(s, quota, tokens, cost, now)
  if quota[6] >= 0 and s[RUNNING] >= quota[6] then return 'concurrency' end
  if quota[4] >= 0 and advance(s, now) >= s[LIMIT] then return 'rate' end
  if quota[2] >= 0 and not bucket_holds(s, tokens, now) then return 'rate' end
  if quota[7] >= 0 and not daily_holds(s, DAY, USED, quota[7], tokens, now) then return 'quota' end
  if quota[8] >= 0 and not daily_holds(s, COST_DAY, COST, quota[8], math.min(cost, quota[8]), now) then
    return 'quota'
  end
  return nil
end

-- Seconds until the meter would take the request; nil if time alone will not help.
local function wait_of(s, quota, tokens, cost, now)
  local longest, known, parts = 0, 0, 0
  local function see(wait)
    parts = parts + 1
    if wait then
      known = known + 1
      longest = math.max(longest, wait)
    end
  end
  if quota[4] >= 0 then see(window_wait(s, now)) end
  if quota[2] >= 0 then see(bucket_wait(s, tokens, now)) end
  if quota[7] >= 0 and not daily_holds(s, DAY, USED, quota[7], tokens, now) then
    see(daily_wait(s, DAY, now))
  end
  if quota[8] >= 0 and not daily_holds(s, COST_DAY, COST, quota[8], math.min(cost, quota[8]), now) then
    see(daily_wait(s, COST_DAY, now))
  end
  if known > 0 and known == parts then return longest end
  return nil
end

local function charge(s, quota, tokens, cost, now)
  if quota[2] >= 0 then s[LEVEL] = s[LEVEL] - tokens end
  if quota[7] >= 0 then s[USED] = new_day(s, DAY, USED, now) + tokens end
  if quota[8] >= 0 then
    s[COST] = new_day(s, COST_DAY, COST, now) + math.min(cost, quota[8])
  end
  s[SPENT] = s[SPENT] + tokens
end

local function give_back(s, quota, back, cost_back, at, now)
  if quota[2] >= 0 then bucket_settle(s, back, now) end
  if quota[7] >= 0 then daily_settle(s, DAY, USED, back, at, now) end
  if quota[8] >= 0 then daily_settle(s, COST_DAY, COST, cost_back, at, now) end
end

-- Charge what was spent between `since` and now: first against what the full bucket had to turn away
-- in that time, as if the two had come together, then against its level.
local function charge_late(s, spent, since, now)
  refill(s, now)
  local turned_away = math.min(s[OVERFLOW], s[RATE] * math.max(s[OVERFLOW_END] - since, 0))
  local covered = math.min(math.max(spent, 0), turned_away)
  s[OVERFLOW] = s[OVERFLOW] - covered
  bucket_settle(s, covered - spent, now)
end

-- Another gateway saw a lower level before the store came back empty than the one the meter was made
-- with: what it knows of was charged before that.
local function heard_lower(s, quota, hint, since, now)
  if quota[2] < 0 or hint[4] ~= 1 then return end
  local made = s[BORN] + (now - s[BORN_AT]) * s[RATE]
  if hint[1] < made then
    charge_late(s, made - hint[1], since, now)
    s[BORN], s[BORN_AT] = hint[1], now
  end
end

-- leases: KEYS of a tenant are always {meters, held, leases}

-- End what nobody renewed: slots come free, the reservation stays charged (its tokens may well have
-- been streamed) and may still be settled for a while. At most 128 per call.
local function sweep(keys, now, keep)
  local due = redis.call('ZRANGEBYSCORE', keys[3], '-inf', now, 'LIMIT', 0, 128)
  for _, id in ipairs(due) do
    local packed = redis.call('HGET', keys[2], id)
    local record = packed and cmsgpack.unpack(packed)
    if record and record[1] == OPEN then
      for i = 5, #record do
        local state = redis.call('HGET', keys[1], record[i])
        if state then
          local s = cmsgpack.unpack(state)
          s[RUNNING] = math.max(s[RUNNING] - 1, 0)
          redis.call('HSET', keys[1], record[i], cmsgpack.pack(s))
        end
      end
      record[1] = EXPIRED
      redis.call('HSET', keys[2], id, cmsgpack.pack(record))
      redis.call('ZADD', keys[3], now + keep, id)
    else
      redis.call('HDEL', keys[2], id)
      redis.call('ZREM', keys[3], id)
    end
  end
end

local function load(keys, quotas, hints, now)
  local names = {'epoch'}
  for i, quota in ipairs(quotas) do names[i + 1] = quota[1] end
  local packed = redis.call('HMGET', keys[1], unpack(names))
  local states, existed = {}, {}
  for i, quota in ipairs(quotas) do
    existed[i] = packed[i + 1] and true or false
    states[i] = fitted(packed[i + 1], quota, hints and hints[i], now)
  end
  return states, packed[1], existed
end

local function save(keys, quotas, states, epoch)
  local fields = {'epoch', epoch}
  for i, quota in ipairs(quotas) do
    fields[2 * i + 1] = quota[1]
    fields[2 * i + 2] = cmsgpack.pack(states[i])
  end
  redis.call('HSET', keys[1], unpack(fields))
end

local function hold(keys, id, record, until_)
  redis.call('HSET', keys[2], id, cmsgpack.pack(record))
  redis.call('ZADD', keys[3], until_, id)
end

-- {status, reason, wait, epoch, spent, {{level, used, cost}, ...}}; msgpack. wait -1 is "unknown".
local function answer(status, reason, wait, epoch, states)
  local seen = {}
  for i, s in ipairs(states) do seen[i] = {s[LEVEL], s[USED], s[COST]} end
  local spent = states[1] and states[1][SPENT] or 0
  return cmsgpack.pack({status, reason or '', wait or -1, epoch, spent, seen})
end
