"""What goes into the event log comes out equal, and a core that acts otherwise is found out."""

from pathlib import Path
from typing import get_args

import pytest

from domain.events import (
    AnswerBegan,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    ClientGone,
    Committed,
    ConfigReloaded,
    Draining,
    Event,
    FeedbackGiven,
    FirstToken,
    FleetChanged,
    ForeignLoad,
    Hold,
    ModelSwapped,
    PolicyChanged,
    Progress,
    Reading,
    Reason,
    ScorerLate,
    Shed,
    Tick,
    TrialChanged,
)
from domain.fleet import FleetSpec, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from gateway.event_log import EventLog, digest, read, read_header, replay

REQUEST = InferenceRequest(
    id="r1", tenant="t", model="m", prompt_tokens=3.5, slo=Slo(ttft=0.2), blocks=(1, 2**63), tie=7
)
FULL = Path("/dev/full")
FLEET = FleetSpec(
    replicas=(ReplicaSpec(name="a", variant="v"),), variants=(Variant(name="v", model="m"),)
)
EVENTS = [
    Arrived(1.0, REQUEST),
    Committed(1.0, "r1", 1, level=3.0),
    FirstToken(1.1, "r1", 1),
    Progress(1.2, (0,), (3,), (17,)),
    AnswerBegan(1.3, "r1", 1, 12),
    AttemptEnded(2.0, "r1", 1, Cause.FINISHED, Usage(prompt=3, source=UsageSource.ENGINE), 1.9),
    ClientGone(2.0, "r1"),
    Reading(2.0, 0, 1.9, running=1.0),
    AvailabilityChanged(2.0, 0, False, "down"),
    FleetChanged(2.0, FLEET),
    ConfigReloaded(2.0, (Tenant(name="t", models=frozenset({"m"})),), (SloClass(name="c"),)),
    ModelSwapped(2.0, "v2", b"PK\x03\x04\x00"),
    FeedbackGiven(2.0, "a", "fp8", 0.5),
    ScorerLate(2.0, 0.1),
    Tick(3.0),
    Draining(4.0),
    ForeignLoad(4.1, (1.0,), (512.0,), (0.0,)),
    PolicyChanged(2.0, '{"kind":"round_robin"}'),
    TrialChanged(1.0, "{}"),
]


def act(event):
    return (
        [Hold(event.id), Shed(event.id, Reason.RATE, 1.5)] if isinstance(event, ClientGone) else []
    )


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.bin"
    with EventLog(path, {"policy": "best_fit"}) as out:
        for event in EVENTS:
            out.append(event, act(event))
    return path


def test_every_kind_of_event_comes_back_equal(log):
    assert {type(e) for e in EVENTS} == set(get_args(Event))
    assert [f.event for f in read(log)] == EVENTS
    assert read_header(log) == {"policy": "best_fit"}


def test_the_same_core_acts_the_same(log):
    result = replay(read(log), act)
    assert (result.events, result.actions, result.differs_at) == (len(EVENTS), 2, None)


def test_another_core_is_found_out_at_the_event(log):
    result = replay(read(log), lambda event: [])
    assert result.differs_at == 6
    assert result.differing == EVENTS[6]


def test_a_log_cut_anywhere_gives_the_events_before(log):
    whole = log.read_bytes()
    for cut in range(len(whole) - 60, len(whole)):
        log.write_bytes(whole[:cut])
        events = [f.event for f in read(log)]
        assert events == EVENTS[: len(events)]
        assert len(events) >= len(EVENTS) - 4


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"hello")
    with pytest.raises(ValueError, match="no event log"):
        list(read(tmp_path / "x"))


def test_digest_tells_kinds_apart():
    assert digest([Hold("a")]) != digest([Shed("a", Reason.RATE)])
    assert digest([]) != digest([Hold("a")])


@pytest.mark.skipif(not FULL.exists(), reason="a disk that is full is Linux's /dev/full")
def test_a_full_disk_ends_the_log_and_nothing_else(caplog):
    with EventLog(FULL, {}) as log:
        for _ in range(5000):  # more than the buffer holds
            log.append(EVENTS[0], [])
    assert len(caplog.messages) == 1
    with EventLog(FULL, {}) as log:
        log.append(EVENTS[0], [])  # fails on leaving
    assert len(caplog.messages) == 2
