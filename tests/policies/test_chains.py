"""Chains: the steps of one session share one deadline."""

import pytest

from domain.events import Arrived, AttemptEnded
from domain.outcome import Cause, Usage, UsageSource
from domain.request import Slo, SloClass
from policies.chains import LEAST, Chains
from tests.fakes.shells import Shell, make_core, request

AGENT = SloClass(name="agent", rank=0, chain=10.0)


def limit(chains: Chains, now: float, session="s", tenant="t", slo=None):
    step = request(f"{now}", tenant=tenant, session=session, slo=slo or Slo(ttft=1.0))
    return chains.step(step, AGENT, now).slo


def test_each_step_gets_what_is_left():
    """The first step has the whole budget, later ones the rest, none less than `LEAST`."""
    chains = Chains()
    assert limit(chains, 100.0) == Slo(ttft=1.0, e2e=10.0)
    assert limit(chains, 104.0).e2e == pytest.approx(6.0)
    assert limit(chains, 115.0).e2e == LEAST


def test_a_steps_own_tighter_limit_stays():
    """A step never gets more than it asked for."""
    chains = Chains()
    assert limit(chains, 0.0, slo=Slo(e2e=3.0)).e2e == 3.0
    assert limit(chains, 8.0, slo=Slo(e2e=3.0)).e2e == pytest.approx(2.0)


def test_sessions_of_other_tenants_and_without_name_are_their_own():
    """The same id under another tenant is another chain; without an id there is none."""
    chains = Chains()
    limit(chains, 0.0)
    assert limit(chains, 5.0, tenant="u").e2e == 10.0
    assert limit(chains, 5.0, session=None).e2e is None


def test_a_chain_begins_anew_after_its_end_and_a_quiet_time():
    """An id that is used again much later starts over."""
    chains = Chains()
    limit(chains, 0.0)
    assert limit(chains, 21.0).e2e == 10.0


def test_chains_are_bounded_and_the_longest_unused_goes_first():
    """Ten thousand sessions do not become a leak."""
    chains = Chains(limit=2)
    limit(chains, 0.0, session="a")
    limit(chains, 1.0, session="b")
    limit(chains, 2.0, session="a")
    limit(chains, 3.0, session="c")
    assert len(chains) == 2
    assert limit(chains, 4.0, session="a").e2e == pytest.approx(6.0)
    assert limit(chains, 4.0, session="b").e2e == 10.0


def test_the_core_judges_a_step_by_what_its_chain_had_left():
    """The second step is late for the chain although it was quick itself; a replay agrees."""

    def core():
        return make_core("least_requests", classes=(AGENT,))

    shell = Shell(core())
    usage = Usage(prompt=100, completion=20, source=UsageSource.ENGINE)
    for name, at, took in (("one", 0.0, 2.0), ("two", 8.0, 1.0), ("three", 8.5, 3.0)):
        shell.tell(Arrived(at, request(name, class_name="agent", session="s", slo=Slo())))
        shell.tell(AttemptEnded(at + took, name, 1, Cause.FINISHED, usage, at + took))
    met = {name: shell.settled[name].outcome.met for name in ("one", "two", "three")}
    assert met == {"one": True, "two": True, "three": False}
    again = core()
    assert all(again.handle(event) == actions for event, actions in shell.log)
