-- After an outage: charge what a gateway let pass on its own share of a tenant's quotas.
-- KEYS: meters, held, leases of the tenant.
-- ARGV: id of this gateway's outage, keep s, quotas and hints (msgpack), per meter {tokens, cost,
--   requests let pass alone, requests of the last minute in all} (msgpack), the epoch it knew,
--   a new epoch if there is none, seconds since the outage began.
-- Returns meter.lua's answer. The same outage is charged once. A server that kept its state gets
-- the requests let pass alone; one that came back empty all of the last minute.
local id, keep = ARGV[1], tonumber(ARGV[2])
local quotas, hints, away = cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4]), cmsgpack.unpack(ARGV[5])
local now = clock()
local since = now - tonumber(ARGV[8])

local states, epoch, existed = load(KEYS, quotas, hints, now)
local same = epoch == ARGV[6]
epoch = epoch or ARGV[7]
if redis.call('HGET', KEYS[2], id) then return answer(1, nil, nil, epoch, states) end
for i, quota in ipairs(quotas) do
  local s, spent = states[i], away[i]
  if existed[i] and not same then heard_lower(s, quota, hints[i], since, now) end
  if quota[2] >= 0 then charge_late(s, spent[1], since, now) end
  if quota[7] >= 0 then daily_settle(s, DAY, USED, -spent[1], now, now) end
  if quota[8] >= 0 then daily_settle(s, COST_DAY, COST, -spent[2], now, now) end
  if quota[4] >= 0 then
    advance(s, now)
    count(s, (same and existed[i]) and spent[3] or spent[4])
  end
  s[SPENT] = s[SPENT] + spent[1]
end
save(KEYS, quotas, states, epoch)
hold(KEYS, id, {DONE}, now + keep)
return answer(1, nil, nil, epoch, states)
