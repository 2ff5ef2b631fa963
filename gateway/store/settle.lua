-- End one request, once: the difference between what it reserved and what it used goes back to the
-- tenant (or is charged), its slots come free.
-- KEYS: meters, held, leases of the tenant.
-- ARGV: request id, keep s, tokens used, cost (-1: as reserved), 1 to revoke (it was never sent and
--   has cost nothing), tokens and cost that this store is known to have reserved (0: not known),
--   quotas and hints (msgpack), epoch if there is none.
-- Returns 1 settled, 0 it already was. A request the store does not know (it restarted, or the
-- reservation never arrived) is charged for what it used beyond what is known to be reserved.
local id, keep = ARGV[1], tonumber(ARGV[2])
local used, cost, revoked = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local quotas, hints = cmsgpack.unpack(ARGV[8]), cmsgpack.unpack(ARGV[9])
local now = clock()

local packed = redis.call('HGET', KEYS[2], id)
local record = packed and cmsgpack.unpack(packed)
if record and record[1] == DONE then return 0 end

local states, epoch = load(KEYS, quotas, hints, now)
local tokens = record and record[2] or tonumber(ARGV[6])
local reserved_cost = record and record[3] or tonumber(ARGV[7])
local at = record and record[4] or now
if cost < 0 then cost = reserved_cost end
for i, quota in ipairs(quotas) do
  local s = states[i]
  if record and record[1] == OPEN then s[RUNNING] = math.max(s[RUNNING] - 1, 0) end
  give_back(s, quota, tokens - used, reserved_cost - cost, at, now)
  if revoked and record and quota[4] >= 0 then uncount(s, at, now) end
end
save(KEYS, quotas, states, epoch or ARGV[10])
hold(KEYS, id, {DONE}, now + keep)
sweep(KEYS, now, keep)
return 1
