"""Queue and gate in virtual time: small runs of what `benchmarks/overload.py` measures."""

import pytest

from benchmarks.overload import (
    CLASSES,
    KNEE,
    Inversions,
    attainment,
    calls,
    core,
    of_class,
    play,
    settled,
)


def run(load, seconds=40.0, gateways=1, **kwargs):
    """Records of a stream at this multiple of the knee, its start left out."""
    stream = calls(0, load * KNEE, seconds, gateways=gateways, **kwargs)
    options = {"metrics_delay": 0.5, "round_trip": 1e-3} if gateways > 1 else {}
    return settled(play([core(["t"]) for _ in range(gateways)], stream, **options), 10, seconds)


def test_overload_costs_the_lowest_class_first():
    """Beyond the knee the top class keeps its promises, and classes are met in their order."""
    calm, pressed = run(0.8), run(1.3)
    top, middle, low = (attainment(of_class(pressed, c.name)) for c in CLASSES)
    assert top >= 0.95 * attainment(of_class(calm, "top"))
    assert top >= middle >= low
    assert low < 0.6


def test_four_in_five_of_those_who_wait_retry_after_are_admitted():
    """A refused client that comes back when it was told to is let in."""
    found = play([core(["t"])], calls(0, 1.3 * KNEE, 40.0, patient=True))
    back = [r for r in found if r.call.tries == 2]
    assert len(back) > 20
    assert sum(not r.refused for r in back) / len(back) >= 0.8


def test_a_flood_hardly_touches_the_others():
    """Twenty times a neighbour's rate costs the neighbours little, and nobody is passed by the
    younger of its own tenant beyond the ageing bound.
    """
    quiet = [f"t{i}" for i in range(4)]
    own = [c for t in quiet for c in calls(0, 0.08 * KNEE, 30.0, tenant=t)]
    alone = attainment(play([core(quiet)], own))
    watch = Inversions()
    flood = calls(0, 1.6 * KNEE, 30.0, tenant="flood")
    both = play([core([*quiet, "flood"])], own + flood, watch=watch)
    theirs = [r for r in both if r.call.request.tenant != "flood"]
    assert attainment(theirs) >= alone - 0.05
    assert watch.longest == 0.0


def test_two_gateways_do_as_well_as_one():
    """With old metrics and pushes every 50 ms, no more than a twentieth of the goodput is lost."""
    assert attainment(run(0.85, gateways=2)) >= 0.95 * attainment(run(0.85))


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_run_is_the_same_each_time(gateways):
    """Everything follows from the seed."""
    first, second = (run(1.1, 15.0, gateways) for _ in range(2))
    assert [(r.call.request.id, r.outcome.ended) for r in first] == [
        (r.call.request.id, r.outcome.ended) for r in second
    ]
