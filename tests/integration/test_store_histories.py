"""Thousands of requests whose ends go wrong in every way leave nothing behind in the store."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import msgspec
import pytest

from domain.events import Commit, Settle
from domain.outcome import Cause, Outcome
from domain.request import InferenceRequest, Quota, Tenant
from gateway.store.quota_wire import tenant_keys
from gateway.store.redis import RedisStore
from tests.fakes.store_server import StoreServer

pytestmark = pytest.mark.integration

LEASE = 1.0
BURST = 1e9
# No refill: then the level tells exactly what was charged.
TENANT = Tenant(
    name="t",
    quota=Quota(tokens_per_minute=0.0, burst_tokens=BURST, concurrency=100_000),
    key_quotas={"k": Quota(concurrency=50_000)},
)
LEVEL, RUNNING = 2, 4  # places in a meter's state, see meter.lua


@dataclass
class Books:
    """What the store should have charged: exactly `charged`, and up to `doubtful` more."""

    charged: float = 0.0
    doubtful: float = 0.0
    finished: int = 0
    orphaned: int = 0


@dataclass
class Gateway:
    """One store client that can die."""

    url: str
    name: str
    books: Books
    store: RedisStore | None = None
    waiting: dict = field(default_factory=dict)
    open: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    up: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self):
        """Connect."""
        self.store = RedisStore(
            url=self.url,
            gateway=self.name,
            tenants={"t": TENANT},
            answer=self.answer,
            lease=LEASE,
            retry_interval=0.01,
            answer_timeout=2.0,
        )
        await self.store.__aenter__()
        self.up.set()

    def answer(self, committed):
        """An answer that came later."""
        future = self.waiting.pop(committed.id, None)
        if future is not None and not future.done():
            future.set_result(committed)

    async def ask(self, commit):
        """The answer to a commit."""
        loop = asyncio.get_running_loop()
        self.waiting[commit.id] = future = loop.create_future()
        at_once = self.store.commit(commit, loop.time())
        if at_once is not None:
            self.answer(at_once)
        return await future

    def cut(self):
        """Lose the connection, with everything that is on its way."""
        if self.store._link._pipe is not None:
            self.store._link._pipe.abort()

    async def settled(self):
        """Wait until the store has confirmed every end; ten seconds at most."""
        for _ in range(1000):
            if not self.store.degraded and not self.store._unsettled:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("ends were never confirmed")

    async def die(self):
        """Stop as by kill -9: no goodbye, open requests are orphans, new ones come to the next
        life.
        """
        self.up.clear()
        known = {id_ for id_, held in self.store._held.items() if held.place.name == "STORE"}
        self.cut()
        for id_, tokens in self.open.items():
            if id_ in known:
                self.books.charged += tokens
            else:
                self.books.doubtful += tokens
            self.books.orphaned += 1
        for end in self.store._unsettled:  # whether these arrived, nobody knows
            id_ = end.held.id.decode()
            if id_ in self.ends:
                self.books.charged -= self.ends[id_]
                self.books.doubtful += max(end.held.tokens, self.ends[id_])
        state = self.store._tenants["t"]
        for tallies in (state.tallies, *(outage.tallies for outage in state.uncharged)):
            if "tenant" in tallies:
                self.books.charged -= tallies["tenant"].tokens
                self.books.doubtful += tallies["tenant"].tokens
        self.open.clear()
        for future in self.waiting.values():
            future.cancel()
        self.waiting.clear()
        await self.store.__aexit__(None, None, None)


def commit(id_, tokens, attempt=1):
    return Commit(id_, attempt, "t", None, tokens, key="k", model="m")


def settle(id_, reserved, used):
    request = InferenceRequest(id=id_, tenant="t", model="m", prompt_tokens=1.0)
    outcome = Outcome(request=request, cause=Cause.FINISHED, arrived=0.0, ended=0.0)
    return Settle(id_, "t", used, reserved - used, outcome)


async def history(gateway, id_, rng, books):
    """One request: reserved, perhaps asked for twice, ended once or twice, or orphaned."""
    loop = asyncio.get_running_loop()
    tokens = float(rng.randrange(10, 500))
    await gateway.up.wait()
    gateway.open[id_] = tokens
    answer = await gateway.ask(commit(id_, tokens))
    assert answer.reserved
    if rng.random() < 0.1:
        await gateway.ask(commit(id_, tokens, attempt=2))
    await asyncio.sleep(rng.random() * 0.02)
    if id_ not in gateway.open:  # its gateway died meanwhile
        return
    # Cancelled before it was sent, timed out in the middle, finished, longer than reserved.
    used = float(rng.choice([0, int(tokens * rng.random()), tokens, int(tokens * 1.5)]))
    del gateway.open[id_]
    gateway.ends[id_] = used
    books.charged += used
    books.finished += 1
    for _ in range(1 + (rng.random() < 0.2)):
        gateway.store.settle(settle(id_, tokens, used), loop.time())


async def orphan_safe(coroutine):
    with contextlib.suppress(asyncio.CancelledError):
        await coroutine


async def live(url, count, seed, trouble):
    """`count` histories over three gateways; `trouble(rng, gateways)` between them."""
    rng, books = random.Random(seed), Books()
    gateways = [Gateway(url, f"g{i}", books) for i in range(3)]
    for gateway in gateways:
        await gateway.start()
    tasks = set()
    for i in range(count):
        gateway = rng.choice(gateways)
        task = asyncio.ensure_future(orphan_safe(history(gateway, f"{seed}-{i}", rng, books)))
        tasks.add(task)
        if len(tasks) >= 100:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        if i % 40 == 39:
            await trouble(rng, gateways)
    await asyncio.gather(*tasks)
    for gateway in gateways:
        await gateway.settled()
        assert gateway.store.open == 0
        await gateway.store.__aexit__(None, None, None)
    return books


async def until_swept(server):
    """Touch the tenant after one lease time, as any later request would."""
    await asyncio.sleep(LEASE + 0.05)
    gateway = Gateway(server.url, "sweeper", Books())
    await gateway.start()
    for i in range(20):
        await gateway.ask(commit(f"sweep{i}", 1.0))
        gateway.store.settle(settle(f"sweep{i}", 1.0, 0.0), 0.0)
    await gateway.store.__aexit__(None, None, None)


def states(server):
    keys = tenant_keys("sluice", "t")
    with contextlib.closing(server.client()) as client:
        fields = client.hgetall(keys[0])
    return {
        name.decode(): msgspec.msgpack.decode(packed)
        for name, packed in fields.items()
        if name != b"epoch"
    }


def lived(server, count, trouble):
    """The books, and the store's meters one lease time after the last end."""

    async def body():
        books = await live(server.url, count, count, trouble)
        await until_swept(server)
        return books

    return asyncio.run(body()), states(server)


@pytest.fixture
def server():
    with StoreServer() as running:
        yield running


COUNTS = pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


@COUNTS
def test_nothing_is_left_after_lost_connections_and_tokens_are_charged_once(server, count):
    """To the token, whichever replies were lost and whatever was decided alone meanwhile."""

    async def trouble(rng, gateways):
        if rng.random() < 0.7:
            rng.choice(gateways).cut()

    books, meters = lived(server, count, trouble)
    assert set(meters) == {"tenant", "key:k"}
    assert all(state[RUNNING] == 0 for state in meters.values())
    assert BURST - meters["tenant"][LEVEL] == books.charged
    assert books.finished == count


@COUNTS
def test_a_dead_gateways_requests_end_by_themselves_and_stay_charged(server, count):
    """What was used, and the reservation of those whose gateway died; those that were on their way
    when it died may or may not have been reserved.
    """

    async def trouble(rng, gateways):
        gateway = rng.choice(gateways)
        if rng.random() < 0.3:
            gateway.cut()
        elif rng.random() < 0.3:
            await gateway.die()
            await gateway.start()

    books, meters = lived(server, count, trouble)
    assert all(state[RUNNING] == 0 for state in meters.values())
    charged = BURST - meters["tenant"][LEVEL]
    assert books.orphaned > 0
    assert books.charged <= charged <= books.charged + books.doubtful
    assert books.doubtful < books.charged


@COUNTS
def test_nothing_is_left_after_restarts_of_the_store_in_mid_call(server, count):
    """The store comes back empty and is told the levels last seen: nothing is held, and the level
    is off by no more than what was on its way each time (100 requests are).
    """

    async def trouble(rng, gateways):
        if rng.random() < 0.15:
            server.kill()
            await asyncio.sleep(0.02)
            await asyncio.to_thread(server.start)
        elif rng.random() < 0.2:
            rng.choice(gateways).cut()

    books, meters = lived(server, count, trouble)
    assert all(state[RUNNING] == 0 for state in meters.values())
    charged = BURST - meters["tenant"][LEVEL]
    assert charged == pytest.approx(books.charged, rel=0.15)
