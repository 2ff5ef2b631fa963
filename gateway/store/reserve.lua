-- Reserve tokens of a tenant for one request, under a lease; all of its meters or none.
-- KEYS: meters, held, leases of the tenant (one hash tag).
-- ARGV: request id, lease s, keep s, tokens, cost, quotas and hints (msgpack), epoch if there is none.
-- Returns meter.lua's answer; status 1 reserved, 0 refused, 2 already settled. The same id again
-- is answered the same and charged once.
local id, lease, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local tokens, cost = tonumber(ARGV[4]), tonumber(ARGV[5])
local quotas, hints = cmsgpack.unpack(ARGV[6]), cmsgpack.unpack(ARGV[7])
local now = clock()
sweep(KEYS, now, keep)

local states, epoch = load(KEYS, quotas, hints, now)
epoch = epoch or ARGV[8]
local packed = redis.call('HGET', KEYS[2], id)
if packed then
  local record = cmsgpack.unpack(packed)
  if record[1] == EXPIRED then
    record[1] = OPEN
    for _, s in ipairs(states) do s[RUNNING] = s[RUNNING] + 1 end
    save(KEYS, quotas, states, epoch)
  end
  if record[1] == OPEN then hold(KEYS, id, record, now + lease) end
  return answer(record[1] == DONE and 2 or 1, nil, nil, epoch, states)
end

for i, quota in ipairs(quotas) do
  local reason = refusal(states[i], quota, tokens, cost, now)
  if reason then
    local wait = nil
    for j, other in ipairs(quotas) do
      local one = wait_of(states[j], other, tokens, cost, now)
      if one then wait = math.max(wait or 0, one) end
    end
    save(KEYS, quotas, states, epoch)
    return answer(0, reason, wait and wait > 0 and wait or nil, epoch, states)
  end
end

local record = {OPEN, tokens, cost, now}
for i, quota in ipairs(quotas) do
  local s = states[i]
  s[RUNNING] = s[RUNNING] + 1
  if quota[4] >= 0 then count(s, 1) end
  charge(s, quota, tokens, cost, now)
  record[4 + i] = quota[1]
end
save(KEYS, quotas, states, epoch)
hold(KEYS, id, record, now + lease)
return answer(1, nil, nil, epoch, states)
