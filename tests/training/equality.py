"""The compiled loop and the live core decide alike, at length; not part of the suite.

    python -m tests.training.equality --count 20000
    python -m tests.training.equality --count 2000 --scorers actor,marginal:hold_until=0

Every scorer, 8 and 64 replicas, 0.9 and 1.3 times the knee; the live core takes most of the time,
about a CPU-second for 1,000 to 3,000 requests. Exit code 1 if any time or replica differs.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from benchmarks.simulator_speed import knee, scenario
from policies.config import PolicyConfig
from tests.training.test_fast_path import SCORERS
from training.compare import entrants
from training.evaluate import run_live
from training.fast_path import CompiledLoop
from training.scenario import Case, build


def differences(loop: CompiledLoop, case: Case, policy: PolicyConfig) -> int:
    """Requests whose times, replica or verdict are not the same in both."""
    policy = policy.model_copy(update={"seed": 5})
    fast = loop.run(case, policy)
    slow = run_live(case, policy, learning=False)
    sent = np.isfinite(fast.sent)
    differ = sent != np.isfinite(slow.sent)
    differ |= sent & (fast.replica != slow.replica)
    for name in ("arrival", "sent", "first", "last", "verdict"):
        a, b = getattr(fast, name).astype(float), getattr(slow, name).astype(float)
        differ |= ~((a == b) | (np.isnan(a) & np.isnan(b)))
    return int(differ.sum())


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Print a line for each case; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--scorers", default=",".join([*SCORERS, "marginal:hold_until=0"]))
    parser.add_argument("--replicas", default="8,64")
    parser.add_argument("--loads", default="0.9,1.3")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    loop, wrong, total = CompiledLoop(), 0, 0
    for replicas in map(int, args.replicas.split(",")):
        at = knee(loop, replicas)
        for load in map(float, args.loads.split(",")):
            case = build(scenario(replicas, args.count), load * at, args.seed)
            for entrant in entrants(args.scorers.split(",")):
                began = time.process_time()
                differ = differences(loop, case, entrant.policy)
                wrong, total = wrong + differ, total + args.count
                say(
                    f"{replicas:>3} replicas  {load:.1f} x knee ({load * at:.0f}/s)  "
                    f"{entrant.label:<22}"
                    f"{differ:>6} of {args.count:,} differ  "
                    f"({time.process_time() - began:.0f} CPU-s)"
                )
    say(f"{wrong} of {total:,} requests differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
