"""The prefix index against a plain model of it."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix_index import SESSIONS, PrefixIndex

prompts = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(
    lambda path: tuple(hash(tuple(path[: i + 1])) for i in range(len(path)))
)


@given(
    st.lists(st.tuples(st.sampled_from("aaamc"), st.integers(0, 2), prompts), max_size=60),
    st.integers(2, 12),
)
def test_matches_are_those_of_a_plain_lru(script, capacity):
    """Leading blocks that each replica holds, least recently sent ones fallen out."""
    index = PrefixIndex([capacity] * 3)
    plain = [OrderedDict() for _ in range(3)]
    for op, replica, blocks in script:
        if op == "a":
            index.add(replica, blocks)
            for block in blocks:
                plain[replica].pop(block, None)
                plain[replica][block] = None
            while len(plain[replica]) > capacity:
                plain[replica].popitem(last=False)
        elif op == "c":
            index.clear(replica)
            plain[replica].clear()
        wanted = []
        for held in plain:
            count = next((i for i, b in enumerate(blocks) if b not in held), len(blocks))
            wanted.append(count)
        assert index.matched(blocks) == wanted


def test_nothing_is_left_after_everything_fell_out():
    """The table of holders shrinks with the replicas' lists."""
    index = PrefixIndex([2, 2])
    for i in range(50):
        index.add(i % 2, (i,))
    assert len(index._holders) == 4
    index.clear(0)
    index.clear(1)
    assert not index._holders


def test_more_replicas_may_join():
    """A joined replica starts empty and counts from then on."""
    index = PrefixIndex([4])
    index.add(0, (1, 2))
    index.extend([4])
    assert index.matched((1, 2)) == [2, 0]
    index.add(1, (1,))
    assert index.matched((1, 2)) == [2, 1]


def test_a_session_is_at_home_where_it_ran_last_until_that_restarts():
    """Sessions are per tenant; a restart empties the cache they were sticky for."""
    index = PrefixIndex([4, 4])
    assert index.home("t", "s") is None
    index.join("t", "s", 0)
    index.join("t", "s", 1)
    assert index.home("t", "s") == 1
    assert index.home("u", "s") is None
    index.clear(0)
    assert index.home("t", "s") == 1
    index.clear(1)
    assert index.home("t", "s") is None


def test_old_sessions_are_forgotten():
    """Memory is bounded; the least recently sent session goes first."""
    index = PrefixIndex([4])
    for i in range(SESSIONS):
        index.join("t", str(i), 0)
    index.join("t", "0", 0)
    index.join("t", "new", 0)
    assert index.home("t", "1") is None
    assert index.home("t", "0") == index.home("t", "new") == 0
