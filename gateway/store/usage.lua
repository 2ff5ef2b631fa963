-- What a tenant's meters have counted, to look at. Writes nothing: what other verbs would bring up to
-- date in the store is brought up to date in this call's copy.
-- KEYS: meters, held, leases of the tenant.
-- ARGV: quotas (msgpack).
-- Returns {{running, requests in the window, level, tokens used today, cost today}, ...} (msgpack) in the
-- order of the quotas; -1 where there is no such limit. A meter that nobody has used is full.
local quotas = cmsgpack.unpack(ARGV[1])
local now = clock()
local states = load(KEYS, quotas, nil, now)

-- Holds whose lease is over run no more, though no sweep has come by. At most 1024, as they are few.
local over = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 1024)) do
  local packed = redis.call('HGET', KEYS[2], id)
  local record = packed and cmsgpack.unpack(packed)
  if record and record[1] == OPEN then
    for i = 5, #record do over[record[i]] = (over[record[i]] or 0) + 1 end
  end
end

local counted = {}
for i, quota in ipairs(quotas) do
  local s = states[i]
  counted[i] = {
    math.max(s[RUNNING] - (over[quota[1]] or 0), 0),
    quota[4] >= 0 and advance(s, now) or -1,
    quota[2] >= 0 and refill(s, now) or 0,
    quota[7] >= 0 and new_day(s, DAY, USED, now) or -1,
    quota[8] >= 0 and new_day(s, COST_DAY, COST, now) or -1,
  }
end
return cmsgpack.pack(counted)
