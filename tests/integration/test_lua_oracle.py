"""The Lua verbs against the Python arithmetic, over random histories with a stepped clock."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.request import Quota, Tenant
from gateway.store.quota_wire import Paths, all_quotas, encode, wired
from gateway.store.scripts import scripts
from policies.bucket import STEP, Account
from tests.fakes.store_server import StoreServer

pytestmark = pytest.mark.integration

STEPPED = "local function clock() return tonumber(redis.call('GET', 'test:now')) end\n"
START = 1_764_000_000.0  # an ordinary Unix time, so that Lua works at its size of numbers
NO_LEASE_ENDS = b"1000000000"

TENANT = Tenant(
    name="t",
    quota=Quota(
        tokens_per_minute=1200.0,
        burst_tokens=600.0,
        requests_per_minute=30.0,
        concurrency=6,
        daily_tokens=20_000.0,
    ),
    key_quotas={"a": Quota(concurrency=2, requests_per_minute=7.5, daily_cost=9.0)},
    model_quotas={"big": Quota(tokens_per_minute=300.0)},
)
SMALLER = Tenant(
    name="t",
    quota=Quota(
        tokens_per_minute=600.0,
        burst_tokens=900.0,
        requests_per_minute=12.0,
        concurrency=3,
        daily_tokens=5_000.0,
    ),
    key_quotas={"a": Quota(concurrency=1, requests_per_minute=45.0, daily_cost=20.0)},
    model_quotas={"big": Quota(tokens_per_minute=1500.0)},
)


class LuaAccount:
    """The verbs under the names of `policies.bucket.Account`."""

    def __init__(self, client, tenant):
        self.client = client
        self.paths = Paths("s", tenant)
        self.verbs = scripts(STEPPED)
        for script in self.verbs.values():
            client.script_load(script.text)

    def run(self, verb, keys, *args, now):
        """One verb at the stepped time `now`."""
        pipe = self.client.pipeline(transaction=False)
        pipe.set("test:now", repr(now))
        pipe.execute_command("EVALSHA", self.verbs[verb].sha, len(keys), *keys, *args)
        return pipe.execute()[1]

    def reserve(self, ident, key, model, tokens, cost, now, lease=NO_LEASE_ENDS):
        """(status, reason, wait, what was seen of each meter)."""
        path = self.paths.path(key, model)
        tokens = min(tokens, path.cap)
        hints = encode([seen.hint(now) for seen in path.seen])
        args = (ident, lease, b"60", repr(tokens), repr(cost), path.wire, hints, b"e1")
        status, reason, wait, _, _, seen = msgspec.msgpack.decode(
            self.run("reserve", path.keys, *args, now=now)
        )
        return status, reason, wait, dict(zip(path.names, seen, strict=True))

    def settle(self, ident, key, model, used, cost, now, *, revoke=False, known=(0.0, 0.0)):
        """1 if it was settled by this call."""
        path = self.paths.path(key, model)
        hints = encode([seen.hint(now) for seen in path.seen])
        flag = b"1" if revoke else b"0"
        args = (ident, b"60", repr(used), repr(cost), flag, *map(repr, known), path.wire, hints)
        return self.run("settle", path.keys, *args, b"e1", now=now)

    def usage(self, now):
        """What `Account.usage` gives: name to (running, in the window, level, used, cost)."""
        quotas = all_quotas(self.paths.tenant)
        wire = encode([wired(name, quota) for name, quota in quotas.items()])
        keys = self.paths.path(None, "").keys
        return dict(
            zip(quotas, msgspec.msgpack.decode(self.run("usage", keys, wire, now=now)), strict=True)
        )

    def state(self, name):
        """The stored numbers of one meter."""
        packed = self.client.hget(self.paths.path(None, "").keys[0], name)
        return None if packed is None else msgspec.msgpack.decode(packed)


@pytest.fixture(scope="module")
def server():
    with StoreServer() as running:
        yield running


@pytest.fixture
def client(server):
    with contextlib.closing(server.client()) as connected:
        connected.flushall()
        yield connected


actions = st.one_of(
    st.tuples(
        st.just("admit"),
        st.sampled_from([None, "a"]),
        st.sampled_from(["m", "big"]),
        st.floats(0.0, 900.0),
        st.floats(0.0, 3.0),
    ),
    st.tuples(st.just("settle"), st.floats(0.0, 1500.0), st.floats(0.0, 3.0)),
    st.tuples(st.just("revoke")),
    st.tuples(st.just("again")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("reload")),
)
steps = st.tuples(
    st.floats(0.0, 60.0) | st.just(50_000.0),
    st.sampled_from([0.0] * 12 + [0.4, STEP, 7.0, 90_000.0]),
    actions,
)


@settings(max_examples=150, deadline=None)
@given(history=st.lists(steps, min_size=5, max_size=60))
def test_lua_and_python_agree_on_every_history(server, history):
    """Same answers, waits, levels and counts, bit for bit, through clock steps, reloads, restarts
    of the server and verbs that arrive twice.
    """
    with contextlib.closing(server.client()) as client:
        client.flushall()
        lua, python = LuaAccount(client, TENANT), Account(TENANT, START)
        now, serial, open_, epoch = START, 0, [], 0
        for gap, back, (action, *facts) in history:
            now += gap - back
            match action:
                case "admit":
                    key, model, tokens, cost = facts
                    serial += 1
                    status, reason, wait, seen = lua.reserve(
                        f"r{serial}", key, model, tokens, cost, now
                    )
                    asked = {"key": key, "model": model, "tokens": tokens, "cost": cost}
                    admission = python.admit(prompt=0.0, now=now, **asked)
                    assert status == admission.ok
                    assert reason == (admission.reason or "")
                    assert wait == (admission.retry_after or -1)
                    usage = python.usage(now)
                    for name, (level, used, spent) in seen.items():
                        if usage[name].level is not None:
                            assert level == usage[name].level
                        if usage[name].used_today is not None:
                            assert used == usage[name].used_today
                        if usage[name].cost_today is not None:
                            assert spent == usage[name].cost_today
                    if admission.ok:
                        open_.append((f"r{serial}", key, model, admission, epoch))
                case "settle" | "revoke" if open_:
                    ident, key, model, admission, born = open_.pop(0)
                    revoke = action == "revoke"
                    used, cost = (0.0, 0.0) if revoke else facts
                    if born != epoch:  # the server lost it: both sides only know what was reserved
                        admission = python.adopt(
                            key=key,
                            model=model,
                            tokens=admission.tokens,
                            cost=admission.cost,
                            at=now,
                        )
                        python.settle(admission, used=used, now=now, cost=cost)
                    elif revoke:
                        python.revoke(admission, now=now)
                    else:
                        python.settle(admission, used=used, now=now, cost=cost)
                    known = (admission.tokens, admission.cost)
                    for times in (1, 0):
                        assert times == lua.settle(
                            ident, key, model, used, cost, now, revoke=revoke, known=known
                        )
                case "again" if open_:
                    ident, key, model, admission, born = open_[-1]
                    if born == epoch:
                        status, *_ = lua.reserve(ident, key, model, 1.0, 0.0, now)
                        assert status == 1
                case "restart":
                    client.flushall()
                    python = Account(lua.paths.tenant, now)
                    epoch += 1
                case "reload":
                    tenant = SMALLER if lua.paths.tenant is TENANT else TENANT
                    lua.paths.reload(tenant)
                    python.rescale(tenant, now)
                    for key, model in ((None, "m"), ("a", "m"), (None, "big")):
                        # A meter is rescaled when a verb next touches it; settle something unknown.
                        lua.settle(f"touch{serial}{key}{model}", key, model, 0.0, 0.0, now)
                        serial += 1
        for name, usage in python.usage(now).items():
            state = lua.state(name)
            if state is not None:
                assert state[4] == usage.running


@settings(max_examples=40, deadline=None)
@given(history=st.lists(st.tuples(st.floats(0.0, 60.0), actions), min_size=1, max_size=30))
def test_looking_tells_what_python_counts_and_writes_nothing(server, history):
    """Every figure of every meter, used or not, while time goes forward."""
    with contextlib.closing(server.client()) as client:
        client.flushall()
        lua, python = LuaAccount(client, TENANT), Account(TENANT, START)
        now, open_ = START, []
        for serial, (gap, (action, *facts)) in enumerate(history):
            now += gap
            if action == "admit":
                key, model, tokens, cost = facts
                lua.reserve(f"r{serial}", key, model, tokens, cost, now)
                asked = {"key": key, "model": model, "tokens": tokens, "cost": cost}
                admission = python.admit(prompt=0.0, now=now, **asked)
                if admission.ok:
                    open_.append((f"r{serial}", key, model, admission))
            elif action == "settle" and open_:
                ident, key, model, admission = open_.pop(0)
                lua.settle(ident, key, model, *facts, now)
                python.settle(admission, used=facts[0], now=now, cost=facts[1])
        meters = lua.paths.path(None, "").keys[0]
        before = client.hgetall(meters)
        looked_at = lua.usage(now)
        assert client.hgetall(meters) == before
        for name, usage in python.usage(now).items():
            running, requests, level, used, cost = looked_at[name]
            assert running == usage.running
            assert requests == (
                -1 if usage.requests_in_window is None else usage.requests_in_window
            )
            assert usage.level is None or level == pytest.approx(usage.level)
            assert used == (-1 if usage.used_today is None else usage.used_today)
            assert cost == (-1 if usage.cost_today is None else usage.cost_today)
