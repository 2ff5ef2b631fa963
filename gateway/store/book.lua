-- Book one request on a replica's window (decode) and its prefill backlog, unless with the other
-- gateways' load it would overflow (CORE section 3.9).
-- KEYS: load hash of the decode replica, of the prefill replica (the same one unless split); one
--   hash tag for the fleet.
-- ARGV: gateway, lease s, own load of the decode replica without this request (running, kv,
--   backlog), own load of the prefill replica (running, kv, backlog), room (kv tokens) and backlog
--   (prompt tokens) of this request, max sequences, kv capacity, backlog limit (tokens).
-- Returns 1 booked, 0 refused. Writes this gateway's whole load, so a repetition adds nothing.
local gateway, lease = ARGV[1], tonumber(ARGV[2])
local n = {}
for i = 3, 13 do n[i] = tonumber(ARGV[i]) end
local now = clock()

local function others(key)
  local running, kv, backlog = 0, 0, 0
  local rows = redis.call('HGETALL', key)
  for i = 1, #rows, 2 do
    if rows[i] ~= gateway then
      local row = cmsgpack.unpack(rows[i + 1])
      if row[4] > now then
        running, kv, backlog = running + row[1], kv + row[2], backlog + row[3]
      end
    end
  end
  return running, kv, backlog
end

local split = KEYS[1] ~= KEYS[2]
local running, kv, backlog = others(KEYS[1])
if split then _, _, backlog = others(KEYS[2]) end
local load = n[3] + running
local waiting = (split and n[8] or n[5]) + backlog
local full = load >= n[11]
  or (load > 0 and n[4] + kv + n[9] > n[12])
  or (waiting > 0 and waiting + n[10] > n[13])
if full then return 0 end

local function write(key, r, k, b)
  redis.call('HSET', key, gateway, cmsgpack.pack({r, k, b, now + lease}))
end

if split then
  write(KEYS[1], n[3] + 1, n[4] + n[9], n[5])
  write(KEYS[2], n[6], n[7], n[8] + n[10])
else
  write(KEYS[1], n[3] + 1, n[4] + n[9], n[5] + n[10])
end
return 1
