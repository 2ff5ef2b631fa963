-- Tell the other gateways what this one has on every replica, and hear what they have.
-- KEYS: hash of gateways, then the load hash of every replica (one hash tag for the fleet).
-- ARGV: gateway, lease s (0: it leaves), rows (msgpack: {running, kv, backlog} by replica).
-- Returns msgpack {number of live gateways, {{running, kv, backlog} of the others by replica}}.
local gateway, lease = ARGV[1], tonumber(ARGV[2])
local rows = cmsgpack.unpack(ARGV[3])
local now = clock()

if lease > 0 then
  redis.call('HSET', KEYS[1], gateway, string.format('%.6f', now + lease))
else
  redis.call('HDEL', KEYS[1], gateway)
end
local live = 0
local known = redis.call('HGETALL', KEYS[1])
for i = 1, #known, 2 do
  if tonumber(known[i + 1]) > now then
    live = live + 1
  else
    redis.call('HDEL', KEYS[1], known[i])
  end
end

local heard = {}
for r = 1, #rows do
  local key, running, kv, backlog = KEYS[r + 1], 0, 0, 0
  local all = redis.call('HGETALL', key)
  local mine = false
  for i = 1, #all, 2 do
    if all[i] == gateway then
      mine = true
    else
      local row = cmsgpack.unpack(all[i + 1])
      if row[4] > now then
        running, kv, backlog = running + row[1], kv + row[2], backlog + row[3]
      else
        redis.call('HDEL', key, all[i])
      end
    end
  end
  local own = rows[r]
  if lease > 0 and (own[1] ~= 0 or own[2] ~= 0 or own[3] ~= 0) then
    redis.call('HSET', key, gateway, cmsgpack.pack({own[1], own[2], own[3], now + lease}))
  elseif mine then
    redis.call('HDEL', key, gateway)
  end
  heard[r] = {running, kv, backlog}
end
return cmsgpack.pack({live, heard})
