"""The data sets a trace can come from, read at run time from a folder given by the caller.

Each loader names its source; licences and statistics stand in the README beside each file. pyarrow
is imported only when a file is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError
from training.traces import (
    Floats,
    Ints,
    Trace,
    poisson,
    renewal_window,
    trace,
)

MOONCAKE_TICK = 3.0
"""Seconds between two recorded arrival times of the Mooncake trace (its README)."""
SERVEGEN_WINDOW = 600.0
"""Seconds that one row of ServeGen's rates covers."""
SERVEGEN_LEVELS: Floats = np.array(
    [0, .005, .01, .02, .05, *np.arange(.1, .91, .05), .925, .95, .97, .98, .99, .995, 1]
)  # fmt: skip
"""Levels, (29,), of the quantiles of ServeGen's lengths."""
SOURCES = ("azure_code", "mooncake", "sharegpt", "agents", "vllm_logs", "provider_logs",
           "servegen/m-large", "servegen/m-small", "servegen/deepseek-r1",
           "servegen/mm-image")  # fmt: skip
"""Names that `load` takes."""


def default_data() -> Path:
    """Where data sets are looked for: $SLUICE_DATA, else `shared/data` beside the repository."""
    root = Path(__file__).resolve().parents[1]
    return Path(os.environ.get("SLUICE_DATA", root.parent / "shared" / "data"))


def load(
    name: str,
    data: Path,
    rng: np.random.Generator,
    *,
    seconds: float = 3600.0,
    rate: float = 1.0,
) -> Trace:
    """The trace called `name`.

    `seconds` is how much of a generated mixture is drawn, `rate` (1/s) how often a session starts
    where the source has no clock. Raises: ValueError for an unknown name.
    """
    match name.split("/"):
        case ["azure_code"]:
            return azure_code(data)
        case ["mooncake"]:
            return mooncake(data, rng)
        case ["sharegpt"]:
            return sharegpt(data, rng, rate=rate)
        case ["agents"]:
            return agents(data, rng, rate=rate)
        case ["vllm_logs"]:
            return vllm_log(data, "RTXPRO6000", "meta-llama/Llama-3.1-8B").trace
        case ["provider_logs"]:
            return provider_log(data, rng, rate=rate).trace
        case ["servegen", workload]:
            return servegen(data, workload, rng, seconds=seconds)
        case _:
            raise ValueError(f"unknown trace {name!r}; known: {', '.join(SOURCES)}")


def columns(path: Path, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Columns of a Parquet file as numpy arrays (lists stay lists).

    Raises: FileNotFoundError that says where it looked; ConfigError without pyarrow.
    """
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError as exc:
        raise ConfigError("traces are Parquet files: `pip install pyarrow` reads them") from exc

    if not path.exists():
        raise FileNotFoundError(f"no data set at {path}; set --data or SLUICE_DATA")
    table = pq.read_table(path, columns=None if names is None else list(names))
    return {
        field.name: column.to_pylist()
        if str(field.type).startswith("list")
        else np.asarray(column.to_pylist() if "dict" in str(field.type) else column.to_numpy())
        for field, column in zip(table.schema, table.columns, strict=True)
    }


def azure_code(data: Path) -> Trace:
    """Azure LLM inference trace 2023, code service: 57 minutes, very bursty (P. Patel et al.,
    "Splitwise", ISCA 2024).
    """
    c = columns(data / "azure_llm_2023" / "azure_code_2023.parquet")
    return trace(c["arrival_s"], c["input_tokens"], c["output_tokens"])


def mooncake(data: Path, rng: np.random.Generator) -> Trace:
    """Mooncake conversation trace with its prefix blocks (R. Qin et al., "Mooncake", FAST 2025).

    Arrivals are recorded in 3-second ticks; each tick's requests are spread over its three seconds
    in their order.
    """
    c = columns(data / "mooncake" / "mooncake_conversation.parquet")
    at = c["arrival_s"].astype(np.float64)
    place = rng.random(len(at)) * MOONCAKE_TICK
    for tick in np.unique(at):
        same = at == tick
        place[same] = np.sort(place[same])
    return trace(
        at + place,
        c["input_tokens"],
        c["output_tokens"],
        blocks=c["hash_ids"],
        block_tokens=512.0,
    )


def servegen(
    data: Path,
    workload: str,
    rng: np.random.Generator,
    *,
    start: float = 0.0,
    seconds: float = 3600.0,
    thin: float = 1.0,
) -> Trace:
    """A mixture of ServeGen's clients from `start` for `seconds` (s of the recording); a tenant is
    a client.

    Per client and 600 s window: a renewal stream of the published family and shape at the published
    rate times `thin`, lengths from the client's quantiles, input and output apart. Clients without
    a length profile are left out. Source: Y. Xiang et al., "ServeGen", 2025.
    Raises: ValueError for an unknown workload.
    """
    rates = columns(data / "servegen" / "client_rates.parquet")
    here = rates["workload"] == workload
    if not here.any():
        known = sorted(set(rates["workload"].tolist()))
        raise ValueError(f"unknown ServeGen workload {workload!r}; known: {', '.join(known)}")
    profiles = _profiles(data, workload)
    begin = rates["window_start_s"].astype(np.float64)
    here &= (begin + SERVEGEN_WINDOW > start) & (begin < start + seconds)
    at: list[Floats] = []
    lengths: list[Floats] = []
    clients: list[Ints] = []
    for row in np.flatnonzero(here):
        client = int(rates["client"][row])
        if client not in profiles:
            continue
        stream = renewal_window(
            str(rates["iat_family"][row]),
            float(rates["p1"][row]),
            float(rates["rate_rps"][row]) * thin,
            SERVEGEN_WINDOW,
            rng,
        )
        at.append(stream + begin[row] - start)
        clients.append(np.full(len(stream), client))
        lengths.append(_lengths(profiles[client], begin[row], len(stream), rng))
    when = np.concatenate(at or [np.zeros(0)])
    size = np.concatenate(lengths or [np.zeros((0, 2))])
    names, tenant = np.unique(
        np.concatenate(clients or [np.zeros(0, np.int64)]), return_inverse=True
    )
    inside = (when >= 0) & (when < seconds)
    return trace(
        when[inside],
        size[inside, 0].round(),
        size[inside, 1].round(),
        tenant_id=tenant[inside],
        tenants=tuple(f"client-{name}" for name in names),
    )


Profile = dict[str, tuple[Floats, Floats]]
"""Field of lengths to window starts (k,) and quantiles (k, 29)."""


def _profiles(data: Path, workload: str) -> dict[int, Profile]:
    """Length profiles of the clients of a workload."""
    c = columns(data / "servegen" / "client_lengths.parquet")
    found: dict[int, Profile] = {}
    for client in np.unique(c["client"][c["workload"] == workload]):
        mine = (c["workload"] == workload) & (c["client"] == client)
        found[int(client)] = {
            str(field): (
                c["window_start_s"][index].astype(np.float64),
                np.array([c["quantiles"][i] for i in index]),
            )
            for field in np.unique(c["field"][mine])
            for index in [np.flatnonzero(mine & (c["field"] == field))]
        }
    return found


def _lengths(profile: Profile, at: float, n: int, rng: np.random.Generator) -> Floats:
    """(n, 2) prompt and output tokens; the prompt of a picture request is its text and pictures."""

    def draw(field: str) -> Floats:
        starts, quantiles = profile[field]
        row = max(int(np.searchsorted(starts, at, side="right")) - 1, 0)
        drawn: Floats = np.interp(rng.random(n), SERVEGEN_LEVELS, quantiles[row])
        return drawn

    if "input_tokens" in profile:
        return np.stack([draw("input_tokens"), draw("output_tokens")], axis=1)
    return np.stack([draw("text_tokens") + draw("image_tokens"), draw("output_tokens")], axis=1)


def sharegpt(
    data: Path, rng: np.random.Generator, *, rate: float = 1.0, think: float = 20.0
) -> Trace:
    """ShareGPT conversations: sessions start as a Poisson stream (`rate` 1/s), each turn comes an
    exponential `think` time (mean, s) after the answer to the last, and its prompt holds the
    history.

    Blocks of 64 tokens are shared along a conversation. The source splits long conversations, so
    context growth is cut at about 2,000 tokens.
    """
    c = columns(data / "sharegpt_turn_lengths" / "turns.parquet")
    first = np.flatnonzero(np.r_[True, np.diff(c["conversation"]) != 0])
    sizes = np.diff(np.r_[first, len(c["turn"])])
    starts = poisson(len(first), rate, rng)
    prompt = c["history_tokens"].astype(np.int64) + c["prompt_tokens"]
    pauses = rng.exponential(think, len(prompt))
    shared = np.maximum(c["history_tokens"].astype(np.int64), 0)
    return _sessions(starts, sizes, prompt, c["response_tokens"], pauses, shared, block=64)


def agents(
    data: Path,
    rng: np.random.Generator,
    *,
    rate: float = 1.0,
    ttft: float = 0.5,
    tpot: float = 0.02,
    agent: str | None = None,
) -> Trace:
    """Agent sessions call by call; sessions start as a Poisson stream (`rate` 1/s).

    A recorded gap holds the model's time and the tool's; the think time is what is left of it after
    `ttft` + output * `tpot` seconds, at least 0. Source: LMCache/lmcache-agent-trace.
    """
    c = columns(data / "agent_sessions" / "calls.parquet")
    order = np.lexsort((c["step"], c["session"]))
    if agent is not None:
        order = order[c["agent"][order] == agent]
    session = c["session"][order]
    first = np.flatnonzero(np.r_[True, session[1:] != session[:-1]])
    sizes = np.diff(np.r_[first, len(order)])
    rng.shuffle(sequence := np.arange(len(first)))
    starts = poisson(len(first), rate, rng)[sequence]
    output = c["output_tokens"][order].astype(np.int64)
    served = ttft + tpot * np.r_[0, output[:-1]]
    think = np.maximum(np.nan_to_num(c["gap_s"][order]) - served, 0.0)
    shared = np.nan_to_num(c["prefix_shared_with_prev_tokens"][order]).astype(np.int64)
    return _sessions(
        starts, sizes, c["input_tokens"][order].astype(np.int64), output, think, shared, block=64
    )


def _sessions(
    starts: Floats,
    sizes: Ints,
    prompt: Ints,
    output: NDArray[np.generic],
    think: Floats,
    shared: Ints,
    *,
    block: int,
) -> Trace:
    """Trace of consecutive calls: each follows the one before it in its session.

    `shared` tokens of a prompt repeat the last one's prefix; nominal arrivals add up think times.
    """
    n = len(prompt)
    first = np.cumsum(sizes) - sizes
    session = np.repeat(np.arange(len(sizes)), sizes)
    follows = np.maximum(np.arange(n) - 1, first[session])
    arrival = np.zeros(n)
    blocks: list[list[int]] = []
    fresh = 0
    for i in range(n):
        root = i == first[session[i]]
        arrival[i] = starts[session[i]] if root else arrival[i - 1] + think[i]
        known = [] if root else blocks[i - 1][: int(shared[i]) // block]
        new = -(-int(prompt[i]) // block) - len(known)
        blocks.append(known + list(range(fresh, fresh + max(new, 0))))
        fresh += max(new, 0)
    return trace(
        arrival, prompt, output, session=session, follows=follows,
        think=np.where(follows == np.arange(n), 0.0, think), blocks=blocks, block_tokens=block,
    )  # fmt: skip


# ---- measured runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestLog:
    """A trace with what was measured: (n,) seconds each, from arrival; `failed` rows measure
    nothing.
    """

    trace: Trace
    ttft: Floats
    e2e: Floats
    queue: Floats
    failed: NDArray[np.bool_]


def vllm_log(data: Path, gpu: str, model: str) -> RequestLog:
    """One vLLM run request by request (casys-kaist/LLMServingSim, MIT)."""
    c = columns(data / "engine_vllm_request_logs" / "requests.parquet")
    index = np.flatnonzero((c["gpu"] == gpu) & (c["model"] == model))
    if not len(index):
        known = sorted({(str(g), str(m)) for g, m in zip(c["gpu"], c["model"], strict=True)})
        raise ValueError(f"no run of {model!r} on {gpu!r}; known: {known}")
    index = index[np.argsort(c["arrival_s"][index], kind="stable")]
    run = {name: column[index] for name, column in c.items()}
    return RequestLog(
        trace=trace(run["arrival_s"], run["input_tokens"], run["output_tokens"]),
        ttft=run["ttft_s"],
        e2e=run["e2e_s"],
        queue=run["queue_s"],
        failed=np.zeros(len(index), np.bool_),
    )


def provider_log(data: Path, rng: np.random.Generator, *, rate: float = 1.0) -> RequestLog:
    """Hosted Llama-2 endpoints of 2023, a tenant per provider and model; the source has no clock,
    so requests come as a Poisson stream in the recorded order.

    Failed requests carry zeros in the source; here their times are nan.
    """
    c = columns(data / "provider_latency_llmperf" / "llmperf_requests.parquet")
    failed = ~np.isnan(c["error_code"].astype(np.float64))
    order = np.lexsort((c["model"], c["provider"], c["seq"]))
    names = np.array([f"{p}/{m}" for p, m in zip(c["provider"], c["model"], strict=True)])
    tenants, tenant = np.unique(names[order], return_inverse=True)
    fine = np.where(failed, np.nan, 1.0)[order]
    return RequestLog(
        trace=trace(
            poisson(len(order), rate, rng),
            c["input_tokens"][order],
            c["output_tokens"][order],
            tenant_id=tenant,
            tenants=tuple(str(t) for t in tenants),
        ),
        ttft=c["ttft_s"][order] * fine,
        e2e=c["e2e_s"][order] * fine,
        queue=np.full(len(order), np.nan),
        failed=failed[order],
    )
