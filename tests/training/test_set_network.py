"""The network in torch and the kernel that serves it say the same; so do training's views."""

import numpy as np
import pytest
import torch

from policies.factory import build_scorer
from policies.scorers.network import K, observe_into
from tests.fakes.shells import policy
from tests.fakes.states import random_state
from training.set_network import SetNetwork, bounded, logits_of

REACH, HOLD_ABOVE = 0.4, 0.2


def drawn(seed, width=6):
    """A network in which everything counts."""
    torch.manual_seed(seed)
    network = SetNetwork(width, warm=False)
    for p in network.parameters():
        torch.nn.init.normal_(p, 0.0, 0.7)
    return network


def scorer_of(network):
    return build_scorer(
        policy("network", layers=network.layers(), reach=REACH, hold_above=HOLD_ABOVE)
    )


def seen(state, i, rule):
    """Inputs, value, harm (one decision each), worth, and whether an idle replica is there."""
    m = state.mask.shape[1]
    x, harm = np.zeros((m, K)), np.zeros(m)
    value = np.nan_to_num(state.score(build_scorer(policy("marginal", hold_until=0.0))), neginf=0.0)
    worth, free = observe_into(
        x, value[i], harm, rule, state.requests, state.fleet, state.routes, state.estimates,
        state.mask, i, state.now,
    )  # fmt: skip
    one = (x[None], value[i : i + 1], harm[None], np.array([worth]))
    return [torch.from_numpy(a).float() for a in one], free


@pytest.mark.parametrize("seed", range(12))
def test_scores_are_equal_to_a_hundred_thousandth(seed):
    """Of every route, on random fleets; holding set aside."""
    network = drawn(seed)
    scorer = build_scorer(policy("network", layers=network.layers(), reach=REACH, hold_until=0.0))
    state = random_state(seed, m=7, split=seed % 2 == 1)
    served = state.score(scorer)
    for i in np.flatnonzero(state.mask.any(axis=1)):
        (x, value, _, worth), _ = seen(state, i, scorer.params)
        there = torch.from_numpy(state.mask[i : i + 1])
        with torch.no_grad():
            residual, others = network(x, there)
            score = (value + worth[:, None] * bounded(residual, REACH))[0].numpy()
            shed = float(bounded(others[0, 1], REACH))
        room = state.mask[i]
        np.testing.assert_allclose(served[i, room], score[room], atol=1e-5)
        chance = state.estimates.p_slo[i, room].max()
        refusal = score[room].max() + float(worth[0]) * (shed - chance)
        assert state.refusal(scorer)[i] == pytest.approx(refusal, abs=1e-5)


def test_what_is_likeliest_in_training_is_done_in_serving():
    """Route, wait or refusal: the largest logit is what the kernel does."""
    done = set()
    for seed in range(60):
        network = drawn(seed)
        scorer, state = scorer_of(network), random_state(seed, m=4)
        state.requests.arrived[:] = state.now - 0.01
        state.requests.ttft[:] = 1.0
        scores, held, refusal = state.score(scorer), state.held(scorer), state.refusal(scorer)
        for i in np.flatnonzero(state.mask.any(axis=1)):
            parts, free = seen(state, i, scorer.params)
            allowed = torch.tensor([[*state.mask[i], not free, True]])
            with torch.no_grad():
                logits = logits_of(
                    network, *parts, allowed, hold_above=HOLD_ABOVE, reach=REACH, temperature=0.1
                )[0].numpy()
            best = int(np.where(state.mask[i], scores[i], -np.inf).argmax())
            served = 4 if np.isfinite(held[i]) else 5 if refusal[i] > scores[i, best] else best
            top, other = np.sort(logits)[[-1, -2]]
            if top - other > 1e-3:
                assert int(logits.argmax()) == served
                done.add(min(served, 5) if served >= 4 else "route")
    assert done == {"route", 4, 5}


def test_at_first_the_logits_are_the_rules():
    """Whatever the layers below the heads hold."""
    network = SetNetwork(8)
    scorer = build_scorer(policy("marginal"))
    state = random_state(3, m=6)
    for i in np.flatnonzero(state.mask.any(axis=1)):
        parts, free = seen(state, i, scorer.params)
        allowed = torch.tensor([[*state.mask[i], not free, True]])
        with torch.no_grad():
            logits = logits_of(
                network, *parts, allowed, hold_above=0.4, reach=0.5, temperature=1.0
            )[0].numpy()
        value = np.where(state.mask[i], parts[1][0], -np.inf)
        np.testing.assert_allclose(logits[:6][state.mask[i]], (value - value.max())[state.mask[i]])


def test_the_order_of_candidates_and_those_not_there_mean_nothing():
    network = drawn(1)
    x, there = torch.randn(2, 5, K), torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1]]).bool()
    order = torch.tensor([3, 0, 4, 2, 1])
    with torch.no_grad():
        routes, others = network(x, there)
        moved, same = network(x[:, order], there[:, order])
        torch.testing.assert_close(routes[:, order], moved)
        torch.testing.assert_close(others, same)
        x[~there] = 7.0
        changed, still = network(x, there)
    torch.testing.assert_close(changed[there], routes[there])
    torch.testing.assert_close(others, still)
