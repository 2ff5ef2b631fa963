-- Server time in seconds (float). Tests put another clock in this file's place to step time.
local function clock()
  local t = redis.call('TIME')
  return t[1] + t[2] / 1000000
end
