"""Fleet state: readings and other gateways' counts, claims, quality floors, change of fleet."""

import numpy as np
import pytest

from domain.events import ForeignLoad, Reading
from domain.fleet import FleetSpec
from policies.fleet_state import FRESH, FleetState
from tests.fakes.shells import CLASSES, small_fleet
from tests.fakes.waiting import Waiting


class Claimant(Waiting):
    """An entry that may claim a window."""

    def __init__(self, tie=1, allowed=(True, True, True), arrived=0.0):
        super().__init__(arrived=arrived, slo_class=CLASSES[2])
        self.claim = None
        self.allowed = np.array(allowed)
        self.tie = tie

    @property
    def request(self):
        """Itself: it carries its own tie."""
        return self


def state(m: int = 3, **kwargs) -> FleetState:
    return FleetState(small_fleet(m, **kwargs), hold=True)


def test_a_younger_reading_wins_whatever_the_order_of_arrival():
    """A reading that was overtaken is ignored and says so."""
    fleet = state()
    assert fleet.read(Reading(5.0, 0, 4.0, running=3.0))
    assert not fleet.read(Reading(6.0, 0, 3.0, running=9.0))
    assert fleet.columns.foreign_running[0] == 3.0


def test_other_gateways_counts_are_not_overwritten_while_fresh():
    """A pushed count beats a scrape for `FRESH` seconds, then scrapes count again."""
    fleet = state()
    fleet.foreign(ForeignLoad(5.0, (2.0, 0.0, 1.0), (100.0, 0.0, 50.0), (10.0, 0.0, 0.0)))
    fleet.read(Reading(5.5, 0, 5.4, running=7.0))
    assert fleet.columns.foreign_running.tolist() == [2.0, 0.0, 1.0]
    assert fleet.columns.foreign_backlog.tolist() == [10.0, 0.0, 0.0]
    fleet.read(Reading(5.0 + FRESH, 0, 5.9, running=7.0))
    assert fleet.columns.foreign_running[0] == 7.0


def test_a_claim_ends_with_the_claimant_the_replica_or_one_more_patience():
    """Claims close one window each, the least filled first."""
    fleet = state()
    fleet.columns.kv_used[:] = 300.0, 100.0, 200.0
    one, two = Claimant(tie=11), Claimant(tie=22, allowed=(True, False, True))
    patience = CLASSES[2].patience
    fleet.press_claims(iter([one, two]), patience - 0.1)
    assert (fleet.claimed == -1).all()
    fleet.press_claims(iter([one, two]), patience + 0.1)
    assert fleet.claimed.tolist() == [-1, 11, 22]
    assert fleet.next_change(patience + 0.1) == pytest.approx(2 * patience + 0.1)
    fleet.release_claim(one)
    fleet.set_usable(2, usable=False)
    fleet.press_claims(iter([]), patience + 0.2)
    assert (fleet.claimed == -1).all()
    fleet.press_claims(iter([one]), patience + 0.3)
    fleet.press_claims(iter([]), 2 * patience + 0.4)
    assert (fleet.claimed == -1).all()


def test_a_floor_closes_what_falls_short_unless_nothing_reaches_it():
    """With no variant good enough the best ones stay open."""
    fleet = state()  # qualities 0.9, 0.7, 0.9
    allowed = np.ones(3, np.bool_)
    fleet.floor_into(0.8, allowed)
    assert allowed.tolist() == [True, False, True]
    only_small = np.array([False, True, False])
    fleet.floor_into(0.8, only_small)
    assert only_small.tolist() == [False, True, False]


def test_a_replica_that_went_away_comes_back_with_an_empty_cache():
    """Its prefix blocks are forgotten when it becomes unusable."""
    fleet = state()
    fleet.prefix.add(1, (7, 8))
    fleet.set_usable(1, usable=False)
    fleet.set_usable(1, usable=True)
    assert fleet.prefix.matched((7, 8)) == [0, 0, 0]


def test_without_hold_every_window_is_open():
    """`hold` False lets replicas queue for themselves."""
    fleet = FleetState(small_fleet(2, max_seqs=1), hold=False)
    fleet.columns.running[:] = 50.0
    fleet.columns.backlog_tokens[:] = 1e6
    assert fleet.any_open(1000.0, 0.0)


def test_replicas_keep_their_index_and_counts_when_the_fleet_changes():
    """Those that stay keep counts, those removed drain, new ones come last."""
    fleet = state(2)
    fleet.columns.running[:] = 1.0, 2.0
    wider = small_fleet(4)
    fleet.change(FleetSpec(replicas=wider.replicas[1:], variants=wider.variants))
    assert [r.name for r in fleet.spec.replicas] == ["r0", "r1", "r2", "r3"]
    assert fleet.columns.running.tolist() == [1.0, 2.0, 0.0, 0.0]
    assert fleet.columns.usable.tolist() == [False, True, True, True]
    assert fleet.served(np.array([True, True, False, False]))
    assert not fleet.served(np.array([True, True, False, False]), excluded=[1])
    fleet.columns.running[:] = 99.0
    assert not fleet.any_open(1.0, 0.0)
    fleet.columns.running[3] = 0.0
    assert fleet.any_open(1.0, 0.0)
