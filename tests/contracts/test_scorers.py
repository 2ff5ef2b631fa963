"""What every scorer promises, run over every scorer the factory can build.

Beside the common contract: each against an independent oracle, and each in a small scenario that it
wins and says why it exists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from domain.columns import FleetColumns
from domain.ports import Lesson
from policies import kernels
from policies.config import PolicyConfig
from policies.factory import build_scorer
from policies.names import ACTOR_CONTEXTS, ACTOR_TRAITS, NETWORK_INPUTS, TRAITS
from policies.scorers.drift_plus_penalty import BASES
from tests.contracts import oracles
from tests.fakes.networks import layers_of
from tests.fakes.shells import SCORERS as KINDS
from tests.fakes.shells import policy
from tests.fakes.states import State, plain_state, random_state

TARGETS = [{"rank": 0, "attainment": 0.95}, {"rank": 1, "attainment": 0.5, "quality": 0.99}]

DENSE = layers_of(
    w1=[[float(name == "running") for name in NETWORK_INPUTS]], w2=[[1.0, 0.0]], route=[4.0]
)
"""Prefers replicas that run much."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "network": {"layers": DENSE},
    "drift_plus_penalty": {"targets": TARGETS, "v": 2.0},
    "actor": {"weights": {"tighter": {"one": -0.5}}},
}
"""Options without which a policy does nothing of its own."""

WEIGHTS = {
    trait: {context: 0.4 * (-1) ** (k + j) / (1 + j) for j, context in enumerate(ACTOR_CONTEXTS)}
    for k, trait in enumerate(ACTOR_TRAITS)
}
"""A residual in which everything counts."""

VARIED = (
    *({"kind": kind} for kind in KINDS),
    {"kind": "best_fit", "ttft_margin": 0.3, "tpot_margin": 0.6, "e2e_margin": 0.5},
    {"kind": "prefix_affinity", "prefix": 0.0, "queue": 1.0, "memory": 5.0},
    {"kind": "sticky", "saturated_ms": 20.0, "session": 0.0, "prefill_bound": True},
    {"kind": "predicted", "ttft": 3.0, "decode": 0.0},
    {"kind": "just_enough", "margin": 0.4},
    {"kind": "marginal", "loss": 3.0, "price": 0.0, "sharpness": 4.0, "size": 1.0},
    {"kind": "marginal", "loss": 0.5, "foreign_tpot_ms": 40.0, "size": 0.5},
    {"kind": "marginal", "hold_above": 0.1, "hold_until": 0.3, "price": 0.5},
    {"kind": "marginal", "hold_until": 0.0},
    {"kind": "linear", "weights": {"quality": 2.0, "cost": -1.5, "e2e": -0.3}, "within": 0.2},
    {"kind": "actor", "weights": WEIGHTS, "loss": 0.5, "size": 0.7, "reach": 0.3},
    {
        "kind": "actor",
        "weights": WEIGHTS,
        "hold_more": {"chance": 0.9, "waited": 2.0, "tight": -0.5},
    },
    {"kind": "actor", "weights": {}, "loss": 0.0, "price": 0.5, "foreign_tpot_ms": 30.0},
    {"kind": "network", "layers": layers_of(3, seed=1), "reach": 0.3, "size": 0.7},
    {"kind": "network", "layers": layers_of(5, seed=2), "loss": 0.5, "hold_above": 0.1},
    {"kind": "network", "layers": layers_of(2, seed=3), "price": 0.5, "foreign_tpot_ms": 30.0},
    {"kind": "bandit", "mode": "ucb", "alpha": 2.0, "price": 0.4},
    *(
        {"kind": "drift_plus_penalty", "base": {"kind": base}, "targets": TARGETS, "v": 3.0}
        for base in BASES
    ),
)


def taught(scorer):
    """The scorer after a few dozen lessons, if it learns: busy replicas miss, idle ones meet."""
    rng = np.random.default_rng(3)
    for _ in range(60 if scorer.learner else 0):
        x = rng.uniform(0.0, 1.0, len(TRAITS))
        x[0], busy = 1.0, rng.random() < 0.5
        x[TRAITS.index("running")] = 1.4 if busy else 0.0
        lesson = Lesson(int(rng.integers(0, 3)), not busy, float(rng.random()), x)
        assert scorer.learner.learn(lesson) is scorer.params
    return scorer


def scorer_of(kind: str, **options):
    return taught(build_scorer(policy(kind, **DEFAULTS.get(kind, {}) | options)))


@pytest.fixture(params=KINDS)
def scorer(request):
    return scorer_of(request.param)


def states():
    return [random_state(seed, split=seed % 2 == 1) for seed in range(6)]


def permuted(state: State, rng: np.random.Generator) -> tuple[State, np.ndarray]:
    """The same state with replicas renumbered and routes in another order; and that order."""
    m, c = len(state.fleet.usable), len(state.routes.decode)
    order, lane = rng.permutation(m), rng.permutation(c)
    place = np.argsort(order)
    fleet = FleetColumns(*(np.ascontiguousarray(a[order]) for a in state.fleet))
    routes = state.routes._replace(
        decode=place[state.routes.decode[lane]],
        prefill=place[state.routes.prefill[lane]],
        variant=state.routes.variant[lane],
        price=state.routes.price[lane],
    )
    estimates = type(state.estimates)(*(np.ascontiguousarray(a[:, lane]) for a in state.estimates))
    moved = replace(
        state,
        fleet=fleet,
        routes=routes,
        estimates=estimates,
        mask=np.ascontiguousarray(state.mask[:, lane]),
        draws=np.ascontiguousarray(state.draws[:, lane]),
    )
    return moved, lane


def test_the_suite_covers_every_kind_that_a_config_can_name():
    """A new policy without an entry here fails."""
    mapping = TypeAdapter(PolicyConfig).json_schema()["$defs"]
    named = set()
    for model in mapping.values():
        kind = model["properties"].get("kind")
        if kind is not None:  # sections of a policy have none
            named |= set(kind.get("enum", [])) or {kind["const"]}
    assert named == set(KINDS)
    assert all(hasattr(oracles, kind) and kind in SCENARIOS for kind in KINDS)


def test_scores_only_where_the_mask_is_set(scorer):
    """Right shape, never nan or +inf, -inf outside the mask, a choice wherever there is one, unless
    the request is held back.
    """
    for state in states():
        got = state.score(scorer)
        free = state.mask & np.isneginf(state.held(scorer))[:, None]
        assert got.shape == state.mask.shape
        assert np.all(np.isneginf(got[~state.mask]))
        assert not np.isnan(got).any()
        assert not np.isposinf(got).any()
        assert np.array_equal(np.isfinite(got).any(axis=1), free.any(axis=1))
        if scorer.name != "power_of_two":  # which scores two routes and no others
            assert np.isfinite(got[free]).all()


def test_an_empty_mask_scores_nothing(scorer):
    """No route, no score."""
    state = random_state(1, masked=0.0)
    assert np.isneginf(state.score(scorer)).all()


def test_idle_fleets_and_absent_limits_are_no_special_case(scorer):
    """Idle replicas and requests without limits give finite scores."""
    assert np.isfinite(plain_state(2).score(scorer)).all()


def test_inputs_are_untouched(scorer):
    """Looking never changes the state."""
    for state in states():
        before = [a.copy() for a in state.arrays()]
        params = scorer.params.copy()
        state.score(scorer)
        assert all(np.array_equal(a, b) for a, b in zip(before, state.arrays(), strict=True))
        assert np.array_equal(params, scorer.params)


def test_same_seed_same_scores(scorer):
    """Equal inputs give equal scores, bit for bit; only scorers that say so read the draws."""
    for state in states():
        first = state.score(scorer)
        assert np.array_equal(first, state.score(scorer))
        other = replace(state, draws=np.random.default_rng(9).random(state.draws.shape))
        assert scorer.random or np.array_equal(first, other.score(scorer))


def test_only_scorers_that_say_so_read_the_predictions(scorer):
    """`needs_estimates` False promises that everything but the prefix cache may be missing."""
    for state in states():
        blank = type(state.estimates)(*(np.full_like(a, np.nan) for a in state.estimates))
        blank = blank._replace(cached=state.estimates.cached, sticky=state.estimates.sticky)
        same = np.array_equal(
            state.score(scorer), replace(state, estimates=blank).score(scorer), equal_nan=True
        )
        assert same is not scorer.needs_estimates


def test_permuting_replicas_permutes_scores(scorer):
    """No replica is preferred for its place in the list."""
    rng = np.random.default_rng(4)
    for state in states():
        moved, lane = permuted(state, rng)
        assert np.allclose(
            state.score(scorer)[:, lane], moved.score(scorer), rtol=1e-12, atol=1e-12
        )


def test_requests_do_not_see_each_other(scorer):
    """Scoring one request alone gives what scoring it among others gave."""
    for state in states():
        for i in range(len(state.requests.prompt)):
            alone = replace(
                state,
                requests=type(state.requests)(*(a[i : i + 1] for a in state.requests)),
                estimates=type(state.estimates)(*(a[i : i + 1] for a in state.estimates)),
                mask=state.mask[i : i + 1],
                draws=state.draws[i : i + 1],
            )
            assert np.array_equal(alone.score(scorer)[0], state.score(scorer)[i])


def test_the_python_source_agrees_with_the_compiled_kernel(scorer):
    """Compilation changes nothing beyond 1e-9."""
    for state in states():
        source = state.score(scorer, scorer.kernel.py_func)
        assert np.allclose(state.score(scorer), source, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", VARIED, ids=lambda c: "-".join(map(str, c.values()))[:60])
def test_an_independent_oracle_agrees(config):
    """Ten lines of numpy say the same on random fleets, whatever the parameters."""
    scorer = scorer_of(**config)
    oracle = getattr(oracles, config["kind"])
    for seed in range(12):
        state = random_state(100 + seed, split=seed % 2 == 1)
        wanted = np.where(state.mask, oracle(state, scorer.params), -np.inf)
        assert np.allclose(state.score(scorer), wanted, rtol=1e-9, atol=1e-9)


def test_version_names_the_parameters():
    """Other parameters, another version; the same ones, the same."""
    assert scorer_of("marginal").version == scorer_of("marginal").version
    assert scorer_of("marginal").version != scorer_of("marginal", loss=2.0).version


# ---- the learned set scorer


def test_without_weights_the_actor_is_the_marginal_rule():
    """Bit for bit, whatever the rule's parameters: where training starts."""
    for options in ({}, {"hold_until": 0.0}, {"loss": 0.4, "size": 0.5, "hold_above": 0.1}):
        rule = scorer_of("marginal", **options)
        learned = scorer_of("actor", weights={}, **options)
        for state in states():
            assert np.array_equal(state.score(rule), state.score(learned))


def test_no_weight_moves_a_score_beyond_the_reach():
    """However wrong it is, training can cost a request's worth times `reach`."""
    wild = {trait: dict.fromkeys(ACTOR_CONTEXTS, 1e6) for trait in ACTOR_TRAITS}
    rule = scorer_of("marginal", hold_until=0.0)
    learned = scorer_of("actor", weights=wild, reach=0.25, hold_until=0.0)
    for state in states():
        moved = state.score(learned)[state.mask] - state.score(rule)[state.mask]
        worth = np.broadcast_to(state.requests.weight[:, None], state.mask.shape)[state.mask]
        assert np.all(np.abs(moved) <= 0.25 * worth + 1e-9)


def test_without_layers_or_with_silent_heads_the_network_is_the_marginal_rule():
    """Bit for bit, holding included, and it refuses nobody: where training starts."""
    silent = layers_of(4, seed=7) | {
        "route": [0.0] * 4, "hold": [0.0] * 4, "shed": [0.0] * 4, "bias": [0.0, 0.0]
    }  # fmt: skip
    for options in ({}, {"loss": 0.4, "size": 0.5, "price": 0.2}, {"hold_above": 0.01}):
        rule = scorer_of("marginal", **options)
        for layers in (None, silent):
            learned = scorer_of("network", layers=layers, **options)
            for state in states():
                wanted = state.score(rule)
                assert np.array_equal(wanted, state.score(learned))
                assert np.array_equal(state.held(rule), state.held(learned))
                served = np.isfinite(wanted).any(axis=1)
                assert np.all(state.refusal(learned)[served] <= wanted.max(axis=1)[served])


def test_no_layers_move_a_score_beyond_the_reach():
    """However wrong they are, a score moves by a request's worth times `reach` at most."""
    wild = layers_of(4, seed=8) | {"route": [1e6, -1e6, 1e6, 1e6], "bias": [-1e6, -1e6]}
    rule = scorer_of("marginal", hold_until=0.0)
    learned = scorer_of("network", layers=wild, reach=0.25, hold_until=0.0)
    for state in states():
        moved = state.score(learned)[state.mask] - state.score(rule)[state.mask]
        worth = np.broadcast_to(state.requests.weight[:, None], state.mask.shape)[state.mask]
        assert np.all(np.abs(moved) <= 0.25 * worth + 1e-9)


def test_the_network_refuses_below_the_chance_it_has_learned():
    """One whose best P(SLO) is below what the head says, and no other."""
    state = plain_state(2)
    learned = scorer_of("network", layers=layers_of(bias=[0.0, 0.6]), reach=10.0)
    line = 0.6 / (1.0 + 0.06)
    for chance in (line - 0.01, line + 0.01):
        state.estimates.p_slo[0] = 0.1, chance
        assert (state.refusal(learned)[0] > state.score(learned).max()) == (chance < line)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": "00000000"},
        {"b1": [0.0, 0.0]},
        {"w1": [[0.0]]},
        {"w2": [[0.0]]},
        {"route": [float("nan")]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_do_not_fit_are_refused(change):
    """Other inputs, another width, no numbers."""
    with pytest.raises(ValidationError):
        policy("network", layers=layers_of() | change)


@pytest.mark.parametrize(
    "patient",
    [
        {"kind": "actor", "weights": {}, "hold_above": 1.0, "hold_more": {"pressure": -20.0}},
        {"kind": "marginal", "hold_until": 1.0},
        {"kind": "network", "layers": None},
    ],
    ids=lambda options: options["kind"],
)
def test_what_would_cost_others_more_is_held_back_while_there_is_time(patient):
    """Its best route breaks another's pace: it waits, up to its TTFT limit. Not for an idle fleet,
    nor without that limit.
    """
    state = plain_state(1, prompt=2000.0)
    state.requests.ttft[:] = 1.0
    patient = scorer_of(**patient)
    assert np.isfinite(state.score(patient)).all()
    crowd(state, 0)
    assert np.isfinite(state.score(scorer_of("marginal", hold_until=0.0))).all()
    assert np.isneginf(state.score(patient)).all()
    assert state.held(patient) == state.now + 1.0
    state.requests.arrived[:] = state.now - 1.5
    assert np.isfinite(state.score(patient)).all()
    state.requests.arrived[:], state.requests.ttft[:] = state.now, np.inf
    assert np.isfinite(state.score(patient)).all()


def test_the_rule_keeps_no_replica_idle():
    """Whoever could have an idle replica is not held back, although he would rather not go there;
    he is where it may not take him.
    """
    state = plain_state(2, prompt=2000.0)
    state.requests.ttft[:] = 1.0
    crowd(state, 0)
    state.estimates.p_slo[0, 1] = 0.1
    patient = scorer_of("marginal")
    assert np.isfinite(state.score(patient)).all()
    state.mask[0, 1] = False
    assert np.isneginf(state.score(patient)).all()


# ---- a scenario for each


def stream(state: State, r: int, slot: int, *, tokens: int = 10, **limits: float) -> None:
    """Books a decoding stream on replica r, begun a second ago."""
    base = {"prompt": 100.0, "expected": 100.0, "tpot": np.inf, "ttft": np.inf, "e2e": np.inf}
    base |= limits
    kernels.book(
        state.fleet,
        r,
        r,
        slot,
        base["prompt"],
        base["prompt"],
        base["expected"],
        base["tpot"],
        base["ttft"],
        base["e2e"],
        state.now - 1.0,
    )
    if tokens:
        kernels.first_token(state.fleet, r, r, slot, state.now - 1.0)
        row = np.array([r]), np.array([slot]), np.array([tokens])
        kernels.progress_many(state.fleet, *row, state.now)


def crowd(state: State, r: int) -> None:
    """Streams on replica r that one more would take out of their pace."""
    for slot in range(1, 4):
        stream(state, r, slot, tpot=0.02, tokens=60, expected=130.0)
    state.estimates.p_slo[0, r] = 0.9


def by_lot() -> State:
    """Equal replicas: only the lot can tell, and it says the second."""
    state = plain_state(3)
    state.draws[0] = 0.2, 0.9, 0.4
    stream(state, 1, 1)
    return state


def turn() -> State:
    """The busy replica is next in turn."""
    state = plain_state(2)
    state.fleet.dispatched[:] = 5.0, 4.0
    stream(state, 1, 1, tokens=0)
    state.fleet.dispatched[1] = 4.0
    return state


def heavy_turn() -> State:
    """Sent to three times as often, but weighted four times as much."""
    state = plain_state(2)
    state.fleet.dispatched[:] = 2.0, 6.0
    state.fleet.speed[:] = 1.0, 4.0
    return state


def few_but_long() -> State:
    """One long stream against two short ones: fewer requests."""
    state = plain_state(2)
    stream(state, 0, 1)
    stream(state, 0, 2)
    stream(state, 1, 3, prompt=3000.0)
    return state


def many_but_short() -> State:
    """Two short streams against one long one: fewer tokens."""
    state = plain_state(2)
    stream(state, 0, 1, prompt=3000.0)
    stream(state, 1, 2)
    stream(state, 1, 3)
    return state


def two_drawn() -> State:
    """The idle first replica was not drawn; of the two that were, the second is less loaded."""
    state = plain_state(3)
    state.draws[0] = 0.1, 0.8, 0.9
    stream(state, 2, 1)
    stream(state, 2, 2)
    stream(state, 1, 3)
    return state


def short_batch_long_queue() -> State:
    """More tokens queue at the first, in a smaller batch; the product decides for the second."""
    state = plain_state(2)
    stream(state, 0, 1, prompt=1500.0, tokens=0)
    stream(state, 1, 2)
    stream(state, 1, 3)
    return state


def snug() -> State:
    """Both meet the limit; the second with less to spare."""
    state = plain_state(2)
    state.requests.ttft[:] = 1.0
    state.estimates.ttft[0, 0], state.estimates.ttft[0, 1] = 0.1, 0.6
    return state


def warm_but_busier() -> State:
    """The second holds the prompt's prefix and runs one request more."""
    state = plain_state(3)
    state.estimates.cached[0, 1] = 90.0
    stream(state, 1, 1)
    for slot in range(2, 7):
        stream(state, 2, slot)
    return state


def warm_and_saturated() -> State:
    """The first is warmest but its prefill backlog is past the limit; the second is warm and
    free.
    """
    state = plain_state(3)
    state.estimates.cached[0] = 90.0, 60.0, 0.0
    state.fleet.backlog_tokens[0] = 1e6
    stream(state, 1, 1)
    return state


def fastest_although_tight() -> State:
    """The second gives the answer first, whatever would have been enough."""
    state = plain_state(2)
    state.requests.e2e[:] = 100.0
    state.estimates.tpot[0, 0], state.estimates.tpot[0, 1] = 0.03, 0.01
    state.fleet.running[1] = 3.0
    return state


def slow_enough() -> State:
    """The second is slowest within the E2E limit, although the first has less TTFT to spare."""
    state = plain_state(3)
    state.requests.ttft[:], state.requests.e2e[:] = 1.0, 20.0
    state.estimates.ttft[0, 0] = 0.75
    state.estimates.tpot[0, 0], state.estimates.tpot[0, 1] = 0.01, 0.2
    state.estimates.tpot[0, 2] = 1.0
    return state


def its_band() -> State:
    """The second's band fits the length; the first is idle."""
    state = plain_state(2, prompt=500.0, expected=300.0)
    state.fleet.pool_high[0] = 400.0
    state.fleet.pool_low[1] = 400.0
    stream(state, 1, 1)
    return state


def harmless() -> State:
    """The first gives the better chance and is less loaded, but a stream there would break its
    pace.
    """
    state = plain_state(2, prompt=2000.0)
    stream(state, 0, 1, tpot=0.02, tokens=60, expected=130.0)
    stream(state, 1, 2)
    stream(state, 1, 3)
    state.estimates.p_slo[0] = 1.0, 0.9
    return state


def cheaper() -> State:
    """The second costs half as much and is busier."""
    state = plain_state(2)
    state.routes.price[:] = 2.0, 1.0
    stream(state, 1, 1)
    return state


def likelier() -> State:
    """The second meets the limits more often, and leaves more to spare: nobody is saved for."""
    state = plain_state(2)
    state.requests.ttft[:] = 1.0
    state.estimates.ttft[0, 1] = 0.01
    state.estimates.p_slo[0] = 0.8, 0.9
    stream(state, 1, 1)
    return state


def spared() -> State:
    """Nobody is expected to lose a limit; the first has the better chance, and a stream whose pace
    is tighter.
    """
    state = plain_state(2)
    state.estimates.p_slo[0] = 1.0, 0.95
    stream(state, 0, 1, tpot=0.2)
    stream(state, 1, 2)
    stream(state, 1, 3)
    return state


def packed() -> State:
    """The same chance on both, and nobody to harm; the second is busier."""
    state = plain_state(2)
    state.requests.ttft[:] = 1.0
    state.estimates.ttft[0, 1] = 0.01
    state.estimates.p_slo[0] = 0.9, 0.85
    for slot in range(3):
        stream(state, 1, slot)
    return state


def learned_otherwise() -> State:
    """The first looks a little better, but replicas as busy as that have missed before."""
    state = plain_state(2)
    state.estimates.p_slo[0] = 0.9, 0.85
    for slot in range(3):
        stream(state, 0, slot)
    state.draws[:] = 0.5
    return state


def in_debt() -> State:
    """The first is the snugger fit, but the class is owed what it was promised."""
    state = plain_state(2)
    state.requests.ttft[:] = 1.0
    state.estimates.ttft[0, 0], state.estimates.ttft[0, 1] = 0.75, 0.7
    state.estimates.p_slo[0] = 0.3, 0.95
    stream(state, 1, 1)
    state.fleet.dispatched[:] = 0.0, 9.0
    return state


SCENARIOS = {
    "random": by_lot,
    "round_robin": turn,
    "weighted_round_robin": heavy_turn,
    "least_requests": few_but_long,
    "least_tokens": many_but_short,
    "power_of_two": two_drawn,
    "lmetric": short_batch_long_queue,
    "best_fit": snug,
    "prefix_affinity": warm_but_busier,
    "sticky": warm_and_saturated,
    "predicted": fastest_although_tight,
    "just_enough": slow_enough,
    "pools": its_band,
    "marginal": harmless,
    "cheapest": cheaper,
    "linear": likelier,
    "actor": spared,
    "network": packed,
    "bandit": learned_otherwise,
    "drift_plus_penalty": in_debt,
}
"""In each, the scorer so named takes route 1."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_wins_its_own_scenario(kind):
    """The scorer takes route 1 where its rule says so, and it alone of some other rule's."""
    assert int(np.argmax(SCENARIOS[kind]().score(scorer_of(kind))[0])) == 1


def test_no_two_scorers_are_the_same():
    """Every pair of scorers disagrees on some scenario."""
    built = {kind: scorer_of(kind) for kind in KINDS}
    choices = {}
    for kind, scorer in built.items():
        choices[kind] = tuple(int(np.argmax(s().score(scorer)[0])) for s in SCENARIOS.values())
    assert len(set(choices.values())) == len(KINDS), choices
