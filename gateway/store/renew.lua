-- Renew the leases of a tenant's open requests, all in one call.
-- KEYS: meters, held, leases of the tenant.
-- ARGV: lease s, keep s, paths (msgpack: a list of quotas per path), hints of each path (msgpack),
--   items (msgpack: {id, tokens, cost, index of its path from 1, 1 to charge if unknown}), epoch.
-- Returns how many were held, reopened or adopted. One that the store has lost is adopted; it is
-- charged only if the caller says that its tokens were never counted here.
local lease, keep = tonumber(ARGV[1]), tonumber(ARGV[2])
local paths, hints, items = cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4]), cmsgpack.unpack(ARGV[5])
local now = clock()
sweep(KEYS, now, keep)

local held = 0
for _, item in ipairs(items) do
  local id, tokens, cost, path = item[1], item[2], item[3], item[4]
  local quotas = paths[path]
  local packed = redis.call('HGET', KEYS[2], id)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[1] == EXPIRED then
    local states, epoch = load(KEYS, quotas, hints[path], now)
    for i, quota in ipairs(quotas) do
      states[i][RUNNING] = states[i][RUNNING] + 1
      if not record and item[5] == 1 then charge(states[i], quota, tokens, cost, now) end
    end
    save(KEYS, quotas, states, epoch or ARGV[6])
    if not record then
      record = {OPEN, tokens, cost, now}
      for i, quota in ipairs(quotas) do record[4 + i] = quota[1] end
    end
    record[1] = OPEN
  end
  if record[1] == OPEN then
    hold(KEYS, id, record, now + lease)
    held = held + 1
  end
end
return held
