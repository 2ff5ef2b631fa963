"""A small scenario without data sets, and a runner that never compiles the loop."""

from training.evaluate import Runner, run_live
from training.scenario import Promise, Replicas, Scenario


class LiveRunner(Runner):
    """Every case through the live core."""

    def run(self, case, policy):
        return run_live(case, policy, learning=False), True


def small(**fields):
    base = {
        "name": "small",
        "fleet": (Replicas(profile="h100-bf16-14b"), Replicas(profile="l40s-int4-14b")),
        "classes": {
            "fast": Promise(ttft=0.5, ttft_per_token=3e-4, tpot=0.04),
            "slow": Promise(rank=1, ttft=2.0, ttft_per_token=6e-4, tpot=0.1),
        },
        "requests": 200,
        "warmup": 20,
    }
    return Scenario(**(base | fields))
