"""The network of `policies.scorers.network` in torch, to be trained, and the policy over it.

Logits of a decision are scores over a temperature, less the best route's: of every route, of
waiting, of refusing. Their largest is what the kernel does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from policies.names import NETWORK_INPUTS, NETWORK_SCHEMA

K = len(NETWORK_INPUTS)
NEVER = -1e9
P_SLO = NETWORK_INPUTS.index("p_slo")


def squash(x: Tensor) -> Tensor:
    """X / (1 + |x|)."""
    return x / (1.0 + x.abs())


def bounded(r: Tensor, reach: float) -> Tensor:
    """About r near zero, never beyond +-reach."""
    return r / (1.0 + r.abs() / reach)


def mean_over(x: Tensor, there: Tensor) -> Tensor:
    """Mean over the candidates (B, M, H) that are there (B, M); 0 where none is."""
    mask = there.unsqueeze(-1).to(x.dtype)
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1.0)


class SetNetwork(nn.Module):
    """Residuals of routes, of holding and of refusing; the heads are zero at first unless `warm` is
    False.
    """

    def __init__(self, width: int, *, warm: bool = True) -> None:
        super().__init__()
        self.one = nn.Linear(K, width)
        self.own, self.pooled = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.route = nn.Linear(width, 1, bias=False)
        self.others = nn.Linear(width, 2)
        for layer in (self.one, self.own, self.pooled):
            nn.init.orthogonal_(layer.weight, 2.0)
        for layer in (self.route, self.others):
            if warm:
                nn.init.zeros_(layer.weight)
            else:
                nn.init.orthogonal_(layer.weight)
        for layer in (self.one, self.own, self.others):
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Of inputs (B, M, K) with candidates `there` (B, M): (B, M), and (B, 2) of holding and
        refusing.
        """
        h = squash(self.one(inputs))
        g = squash(self.own(h) + self.pooled(mean_over(h, there)).unsqueeze(1))
        return self.route(g).squeeze(-1), self.others(mean_over(g, there))

    def layers(self) -> dict[str, Any]:
        """As `policies.config.NetworkLayers` takes them."""
        heads = self.others.weight

        def plain(x: Tensor) -> Any:
            return x.detach().double().tolist()

        return {
            "inputs": NETWORK_SCHEMA,
            "w1": plain(self.one.weight),
            "b1": plain(self.one.bias),
            "w2": plain(torch.cat([self.own.weight, self.pooled.weight], 1)),
            "b2": plain(self.own.bias),
            "route": plain(self.route.weight[0]),
            "hold": plain(heads[0]),
            "shed": plain(heads[1]),
            "bias": plain(self.others.bias),
        }


def logits_of(
    network: SetNetwork,
    inputs: Tensor,
    value: Tensor,
    harm: Tensor,
    worth: Tensor,
    mask: Tensor,
    *,
    hold_above: float,
    reach: float,
    temperature: float,
) -> Tensor:
    """(B, M + 2) of M routes, holding and refusing; `NEVER` outside mask (B, M + 2).

    inputs (B, M, K); the rule's value and harm (B, M) and the request's worth (B,), in requests.
    """
    there = mask[:, :-2]
    residual, others = network(inputs, there)
    score = value + worth.unsqueeze(1) * bounded(residual, reach)
    score = score.masked_fill(~there, NEVER)
    best, first = score.max(1)
    above = (hold_above - bounded(others[:, 0], reach)).clamp(min=0.0)
    wait = harm.gather(1, first.unsqueeze(1)).squeeze(1) - above * worth
    chance = (inputs[:, :, P_SLO] * there).amax(1)
    refuse = worth * (bounded(others[:, 1], reach) - chance)
    scores = torch.cat([score - best.unsqueeze(1), wait.unsqueeze(1), refuse.unsqueeze(1)], 1)
    return (scores / temperature).masked_fill(~mask, NEVER)
