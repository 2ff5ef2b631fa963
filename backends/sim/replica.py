"""Physics of a replica: continuous batching, compiled, in closed form between events.

A replica works in steps. A step decodes one token for every sequence that decodes, then spends its
prefill budget (`chunk` tokens) first come, first served; its time is that of
`domain.fleet.Profile`. A step begins like this (`plan`):

1. Every decoding sequence needs room for one more token. Pages come from the free ones, then from
   prefix blocks that nobody uses, least recently used first; if there are too few, the sequence
   admitted last is preempted: its pages are freed, it goes to the front of the queue, and its
   prompt and what it has generated are computed again.
2. While budget is left, nobody was preempted and fewer than `max_seqs` run, the head of the queue
   is admitted if its whole prompt fits. Leading prompt blocks found in the prefix cache are shared
   and not computed; at least one token always is.

What `Profile` may switch on, nothing of it by default:

- *Speculation* (`spec_tokens` k, `spec_acceptance` a, `spec_batch`). A step that begins with at
  most `spec_batch` decoding sequences drafts k tokens for each and gives each
  E = (1 - a^(k+1)) / (1 - a) tokens on average: whole ones, evenly, the same for all; what is left
  over is the replica's credit, below one token, priced with the contexts. E is kept in parts of
  2^-16. Room is asked for k + 1 tokens. A sequence ends with the step that reaches its length.
- *Uneven contexts* (`per_uneven`): attention waits for the longest sequence, so memory time grows
  with (sequences x longest context - sum of contexts).
- *Adapters* (`lora_slots`, `lora_load`): a job that needs one is admitted when it is resident or
  a slot can be had: an empty one, else that of the adapter no running job uses, whose last job was
  admitted longest ago. A load takes `lora_load` seconds of the step that admits the job.

At its end (`fire`) decoding sequences have one token more, and a prompt that is complete has given
one. Blocks of the prompt become shareable once computed; a block computed twice is kept once.
Aborts and hand-overs take effect at the end of the running step, in their order and before what
ends with it; an arrival joins the next one.

Steps that differ only by growing contexts are one *stretch*: step i takes
base + max(memory_0 + i memory_1, compute_0 + i compute_1), so that any number of them is summed,
and inverted, without a loop. Nothing here runs per token.

A prompt may be computed on one replica and decoded on another: its KV moves layer by layer while
it is computed, so that it is ready at
max(end of prefill + last chunk / layers, begin + all of it) + latency, in transfer time.
A sequence that decodes may be handed over to another replica (`hand_over`): it leaves with the
step that runs, and decodes there once all its KV has moved.

`NONE` is -1 (CORE section 3.13). Jobs are indices; the caller maps requests and attempts to them.
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, return-value, assignment, call-overload"

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.fleet import ReplicaSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Links = NDArray[np.int32]
Records = NDArray[np.void]

NONE = -1
ONE = 1 << 16
"""A whole token in the units of `gain` and `credit`."""
ORDER_BITS = 24
"""Low bits of a heap key: sequences that end with the same step end in order of admission."""
PAGE = 16
"""Tokens of a KV page, as in vLLM's default block size."""

PROFILE_FIELDS = (
    "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention", "experts",
    "expert_tokens", "chunk", "max_seqs", "max_context", "per_uneven", "spec_tokens", "spec_batch",
    "spec_draft", "lora_slots", "lora_load",
)  # fmt: skip
# states of a job
ABSENT, WAITING, PREFILLING, DECODING, MOVING, DONE = 0, 1, 2, 3, 4, 5
# events out of `fire` and `deliver`
FIRST_TOKEN, FINISHED, DELIVERED, LOST = 0, 1, 2, 3


REPLICA = np.dtype(
    [
        # profile: seconds and tokens as in `Profile`
        *((name, np.float64) for name in (
            "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention",
            "experts", "expert_tokens", "per_uneven", "spec_draft", "lora_load")),
        *((name, np.int64) for name in (
            "chunk", "max_seqs", "max_context", "pages", "spec_tokens", "spec_batch",
            "lora_slots")),
        ("spec_gain", np.int64),  # 2^-16 tokens that a speculating step gives a sequence
        ("up", np.int64),
        ("clock", np.float64),  # when the present stretch began
        ("end", np.float64),  # when it ends; inf when idle
        ("stretch", np.int64),  # its steps
        ("steps", np.int64),  # tokens given to each decoding sequence before it
        ("gain", np.int64),  # 2^-16 tokens that a step of the present stretch gives
        ("credit", np.int64),  # 2^-16 tokens, below one, not given yet
        ("base", np.float64),  # s
        ("memory_0", np.float64),
        ("memory_1", np.float64),
        ("compute_0", np.float64),
        ("compute_1", np.float64),
        ("n_decode", np.int64),
        ("context", np.float64),  # tokens attended by the next decode step
        ("n_prefill", np.int64),  # jobs that prefill in the present stretch
        ("partial", np.int64),  # job whose prompt is half computed
        ("n_doomed", np.int64),  # aborted, to leave at the end of the step
        ("free", np.int64),  # pages
        ("evictable", np.int64),  # prefix blocks held by nobody
        ("oldest", np.int64),  # block at the ends of the list of those
        ("newest", np.int64),
        ("admitted", np.int64),  # admissions so far
        ("resident", np.int64),  # adapters in memory
        ("loading", np.int64),  # adapters that the next step loads
        ("head", np.int64),  # of the queue
        ("tail", np.int64),
        ("n_waiting", np.int64),
        ("busy", np.float64),  # s
        ("preemptions", np.int64),
    ]
)  # fmt: skip
"""One replica: its profile and its state."""

JOB = np.dtype(
    [
        ("prompt", np.int64),
        ("output", np.int64),
        ("decode_on", np.int64),  # replica that decodes it; NONE where it prefills
        ("block_low", np.int64),  # its prefix blocks
        ("block_high", np.int64),
        ("state", np.int64),
        ("where", np.int64),
        ("target", np.int64),  # tokens to compute before the next token can come
        ("computed", np.int64),
        ("now_chunk", np.int64),  # tokens of the present step
        ("generated", np.int64),  # at `joined`
        ("joined", np.int64),  # step at which it began to decode
        ("shared", np.int64),  # leading blocks held
        ("hits", np.int64),  # prompt tokens found in the cache at its first admission
        ("order", np.int64),  # of admission
        ("next_job", np.int64),
        ("previous_job", np.int64),
        ("began", np.float64),  # s, start of prefill
        ("adapter", np.int64),  # NONE: the plain model
    ]
)
"""One job: a request on its way through a replica, or through two."""


class Physics(NamedTuple):
    """State of m replicas, N jobs, B prefix blocks and A adapters; S sequences a replica, P tokens
    a page.
    """

    replica: Records  # (m,) of REPLICA
    job: Records  # (N,) of JOB
    heap_key: Ints  # (m, S) decoding jobs by the step that ends them
    heap_job: Ints  # (m, S)
    prefill: Ints  # (m, S)
    doomed: Ints  # (m, S)
    phase: Ints  # (m, P) decoding jobs by when they need a page
    # prefix blocks, (m, B): holders, NONE where not resident, and the list of evictable ones
    holders: Links
    older: Links
    newer: Links
    blocks: Ints  # prefix block numbers that jobs point into
    # adapters, (m, A): running jobs that use it, NONE where not resident; admission of its last job
    adapter_users: Ints
    adapter_last: Ints
    # jobs on their way between replicas, the next one last, (N,) and (1,)
    ready_at: Floats
    ready_job: Ints
    n_moving: Ints
    # link between prefill and decode replicas
    move_per_token: float
    move_latency: float
    layers: float
    page: int  # a power of two
    page_shift: int  # its logarithm
    block: int  # tokens of a prefix block
    block_pages: int


def physics(
    replicas: Sequence[ReplicaSpec],
    jobs: int,
    *,
    blocks: Ints | None = None,
    block_tokens: float = PAGE,
    move_per_token: float = 2.0e-6,
    move_latency: float = 1.0e-3,
    layers: int = 40,
    adapters: int = 0,
) -> Physics:
    """Idle replicas with room for `jobs` jobs.

    `blocks` are prefix block numbers, dense from 0, that jobs point into; `move_per_token` and
    `move_latency` in seconds, of the link between prefill and decode replicas. `adapters`: how many
    different ones jobs may name (`set_adapter`).
    Raises: ValueError where the prefix blocks are no whole tokens.
    """
    if block_tokens != int(block_tokens) or block_tokens < 1:
        raise ValueError(f"prefix blocks must hold a whole number of tokens, not {block_tokens}")
    m, block = len(replicas), int(block_tokens)
    page = gcd(PAGE, block)
    room = max((r.profile.max_seqs for r in replicas), default=1)
    known = np.zeros(0, np.int64) if blocks is None else np.array(blocks, np.int64)
    width = int(known.max(initial=-1)) + 1
    state = np.zeros(m, REPLICA)
    for r, spec in enumerate(replicas):
        for name in PROFILE_FIELDS:
            state[name][r] = getattr(spec.profile, name)
        state["pages"][r] = int(spec.profile.kv_capacity // page)
        state["spec_gain"][r] = speculative_gain(
            spec.profile.spec_tokens, spec.profile.spec_acceptance
        )
    state["gain"] = ONE
    state["up"] = 1
    state["end"] = np.inf
    state["free"] = state["pages"]
    for name in ("partial", "oldest", "newest", "head", "tail"):
        state[name] = NONE
    job = np.zeros(jobs, JOB)
    for name in ("decode_on", "where", "hits", "next_job", "previous_job", "adapter"):
        job[name] = NONE

    def grid(columns: int) -> Ints:
        return np.zeros((m, columns), np.int64)

    def links() -> Links:
        return np.full((m, width), NONE, np.int32)

    return Physics(
        replica=state,
        job=job,
        heap_key=grid(room),
        heap_job=grid(room),
        prefill=grid(room),
        doomed=grid(room),
        phase=grid(page),
        holders=links(),
        older=links(),
        newer=links(),
        blocks=known,
        adapter_users=np.full((m, adapters), NONE, np.int64),
        adapter_last=np.zeros((m, adapters), np.int64),
        ready_at=np.zeros(jobs),
        ready_job=np.zeros(jobs, np.int64),
        n_moving=np.zeros(1, np.int64),
        move_per_token=float(move_per_token),
        move_latency=float(move_latency),
        layers=float(layers),
        page=page,
        page_shift=page.bit_length() - 1,
        block=block,
        block_pages=block // page,
    )


def speculative_gain(tokens: int, acceptance: float) -> int:
    """Tokens that a speculating step gives a sequence on average, in parts of 2^-16.

    (1 - a^(k+1)) / (1 - a) for k drafted tokens, each accepted with chance a while all before it
    were (Leviathan et al., 2023); k + 1 where a is 1.
    """
    return round(sum(acceptance**i for i in range(tokens + 1)) * ONE)


inlined = njit(cache=True, error_model="numpy", forceinline=True)
"""Small functions: a call would copy the description of every array of `Physics`, 1.5 KB."""


# ---- stretches


@njit(cache=True, error_model="numpy")
def span(ph: Physics, r: int, k: int) -> float:
    """Seconds that the first k steps of the present stretch take."""
    d0 = ph.replica[r].memory_0 - ph.replica[r].compute_0
    d1 = ph.replica[r].memory_1 - ph.replica[r].compute_1
    last = d0 + (k - 1) * d1
    # steps before `cut` follow the line that is higher at first
    if (d0 >= 0.0 and last >= 0.0) or (d0 <= 0.0 and last <= 0.0):
        cut = k
    else:
        cut = min(max(int(np.ceil(-d0 / d1)), 0), k)
    by_memory = d0 > 0.0 or (d0 == 0.0 and last >= 0.0)
    first = cut * ph.replica[r].memory_0 + 0.5 * cut * (cut - 1) * ph.replica[r].memory_1
    second = cut * ph.replica[r].compute_0 + 0.5 * cut * (cut - 1) * ph.replica[r].compute_1
    total = first if by_memory else second
    if cut < k:
        n = k - cut
        series = 0.5 * (k * (k - 1) - cut * (cut - 1))
        if by_memory:
            total += n * ph.replica[r].compute_0 + series * ph.replica[r].compute_1
        else:
            total += n * ph.replica[r].memory_0 + series * ph.replica[r].memory_1
    return k * ph.replica[r].base + total


@njit(cache=True, error_model="numpy")
def steps_before(ph: Physics, r: int, now: float, inclusive: bool) -> int:
    """How many steps of the present stretch, all but its last at most, end before `now`, or by it
    if `inclusive`.

    The root of the parabola that the higher line gives is the first guess; the sums decide.
    """
    low, high = np.int64(0), ph.replica[r].stretch
    if high <= 1:
        return low
    t = now - ph.replica[r].clock
    if ph.replica[r].memory_0 >= ph.replica[r].compute_0:
        first, slope = ph.replica[r].memory_0, ph.replica[r].memory_1
    else:
        first, slope = ph.replica[r].compute_0, ph.replica[r].compute_1
    first += ph.replica[r].base - 0.5 * slope
    root = first * first + 2.0 * slope * t
    guess = 2.0 * t / (first + np.sqrt(max(root, 0.0)))
    k, jump = low + 1, np.int64(1)
    k = max(np.int64(guess), k) if guess < high else high - 1
    while True:
        at = ph.replica[r].clock + span(ph, r, k)
        if at < now or (inclusive and at == now):
            low = k
            if high - low <= 1:
                return low
            k = low + min(jump, (high - low) // 2)
        else:
            high = k
            if high - low <= 1:
                return low
            k = high - min(jump, (high - low) // 2)
        jump *= 2


@inlined
def gained(ph: Physics, r: int, k: int) -> int:
    """Tokens that k steps of the present stretch give each decoding sequence."""
    return (ph.replica[r].credit + k * ph.replica[r].gain) >> 16


@njit(cache=True, error_model="numpy")
def tokens_done(ph: Physics, r: int, now: float) -> int:
    """Tokens that the present stretch has given each decoding sequence by `now`."""
    k = ph.replica[r].stretch
    if now < ph.replica[r].end:
        k = steps_before(ph, r, now, True)
    return gained(ph, r, k)


@inlined
def truncate(ph: Physics, r: int, now: float) -> None:
    """End the present stretch with the step that runs at `now`."""
    if ph.replica[r].stretch <= 1:
        return
    k = steps_before(ph, r, now, False) + 1
    ph.replica[r].stretch = k
    ph.replica[r].end = ph.replica[r].clock + span(ph, r, k)


# ---- pages and prefix blocks


@inlined
def pages_for(ph: Physics, tokens: int) -> int:
    """Pages that hold this many tokens."""
    return (tokens + ph.page - 1) >> ph.page_shift


@inlined
def growth(ph: Physics, r: int, k: int) -> int:
    """Pages that k more tokens for every decoding sequence take."""
    pages = ph.replica[r].n_decode * (k >> ph.page_shift)
    at = -ph.replica[r].steps
    for i in range(k & (ph.page - 1)):
        pages += ph.phase[r, (at - i) & (ph.page - 1)]
    return pages


@inlined
def ahead(ph: Physics, r: int) -> int:
    """Tokens for which a step asks room beforehand."""
    return ph.replica[r].spec_tokens + 1


@njit(cache=True, error_model="numpy")
def list_push(ph: Physics, r: int, b: int) -> None:
    """Block b is held by nobody any more: newest of the evictable."""
    ph.older[r, b] = ph.replica[r].newest
    ph.newer[r, b] = NONE
    if ph.replica[r].newest == NONE:
        ph.replica[r].oldest = b
    else:
        ph.newer[r, ph.replica[r].newest] = b
    ph.replica[r].newest = b
    ph.replica[r].evictable += 1


@njit(cache=True, error_model="numpy")
def list_remove(ph: Physics, r: int, b: int) -> None:
    """Block b is held again, or gone."""
    before, after = ph.older[r, b], ph.newer[r, b]
    if before == NONE:
        ph.replica[r].oldest = after
    else:
        ph.newer[r, before] = after
    if after == NONE:
        ph.replica[r].newest = before
    else:
        ph.older[r, after] = before
    ph.replica[r].evictable -= 1


@inlined
def take_pages(ph: Physics, r: int, n: int) -> None:
    """Take n pages, evicting prefix blocks where needed; the caller has checked that they exist."""
    while ph.replica[r].free < n:
        b = ph.replica[r].oldest
        list_remove(ph, r, b)
        ph.holders[r, b] = NONE
        ph.replica[r].free += ph.block_pages
    ph.replica[r].free -= n


@inlined
def available(ph: Physics, r: int) -> int:
    """Pages that are free or can be made so without hurting a sequence."""
    return ph.replica[r].free + ph.replica[r].evictable * ph.block_pages


@inlined
def private_tokens(ph: Physics, j: int) -> int:
    """Tokens in job j's own pages (its prompt is reserved whole)."""
    tokens = ph.job[j].target - ph.job[j].shared * ph.block
    if ph.job[j].state == DECODING:
        tokens += ph.replica[ph.job[j].where].steps - ph.job[j].joined
    return tokens


@inlined
def release_room(ph: Physics, r: int, j: int) -> None:
    """Give back job j's pages and blocks; later blocks are evicted before earlier ones."""
    ph.replica[r].free += pages_for(ph, private_tokens(ph, j))
    if ph.job[j].adapter != NONE and ph.replica[r].lora_slots > 0:
        ph.adapter_users[r, ph.job[j].adapter] -= 1
    for k in range(ph.job[j].shared - 1, -1, -1):
        b = ph.blocks[ph.job[j].block_low + k]
        ph.holders[r, b] -= 1
        if ph.holders[r, b] == 0:
            list_push(ph, r, b)
    ph.job[j].shared = 0


@njit(cache=True, error_model="numpy")
def share_computed(ph: Physics, r: int, j: int) -> None:
    """Make the blocks of j's prompt that are computed by now shareable."""
    whole = min(
        ph.job[j].block_high - ph.job[j].block_low,
        min(ph.job[j].computed, ph.job[j].prompt) // ph.block,
    )
    while ph.job[j].shared < whole:
        b = ph.blocks[ph.job[j].block_low + ph.job[j].shared]
        if ph.holders[r, b] == NONE:
            ph.holders[r, b] = 1
        else:
            if ph.holders[r, b] == 0:
                list_remove(ph, r, b)
            ph.holders[r, b] += 1
            ph.replica[r].free += ph.block_pages
        ph.job[j].shared += 1


# ---- queue and batch


@inlined
def queue_back(ph: Physics, r: int, j: int) -> None:
    """Put j at the end of r's queue."""
    ph.job[j].previous_job = ph.replica[r].tail
    ph.job[j].next_job = NONE
    if ph.replica[r].tail == NONE:
        ph.replica[r].head = j
    else:
        ph.job[ph.replica[r].tail].next_job = j
    ph.replica[r].tail = j
    ph.replica[r].n_waiting += 1
    ph.job[j].state = WAITING


@njit(cache=True, error_model="numpy")
def queue_front(ph: Physics, r: int, j: int) -> None:
    """Put j at the front of r's queue."""
    ph.job[j].next_job = ph.replica[r].head
    ph.job[j].previous_job = NONE
    if ph.replica[r].head == NONE:
        ph.replica[r].tail = j
    else:
        ph.job[ph.replica[r].head].previous_job = j
    ph.replica[r].head = j
    ph.replica[r].n_waiting += 1
    ph.job[j].state = WAITING


@inlined
def queue_remove(ph: Physics, r: int, j: int) -> None:
    """Take j out of r's queue."""
    before, after = ph.job[j].previous_job, ph.job[j].next_job
    if before == NONE:
        ph.replica[r].head = after
    else:
        ph.job[before].next_job = after
    if after == NONE:
        ph.replica[r].tail = before
    else:
        ph.job[after].previous_job = before
    ph.replica[r].n_waiting -= 1


@inlined
def sift_up(ph: Physics, r: int, i: int) -> None:
    """Restore the heap of decoding jobs upwards from i."""
    key, job = ph.heap_key[r, i], ph.heap_job[r, i]
    while i > 0:
        p = (i - 1) // 2
        if ph.heap_key[r, p] <= key:
            break
        ph.heap_key[r, i] = ph.heap_key[r, p]
        ph.heap_job[r, i] = ph.heap_job[r, p]
        i = p
    ph.heap_key[r, i], ph.heap_job[r, i] = key, job


@inlined
def sift_down(ph: Physics, r: int, i: int) -> None:
    """Restore the heap of decoding jobs downwards from i."""
    n = ph.replica[r].n_decode
    key, job = ph.heap_key[r, i], ph.heap_job[r, i]
    while True:
        c = 2 * i + 1
        if c >= n:
            break
        if c + 1 < n and ph.heap_key[r, c + 1] < ph.heap_key[r, c]:
            c += 1
        if key <= ph.heap_key[r, c]:
            break
        ph.heap_key[r, i] = ph.heap_key[r, c]
        ph.heap_job[r, i] = ph.heap_job[r, c]
        i = c
    ph.heap_key[r, i], ph.heap_job[r, i] = key, job


@inlined
def join(ph: Physics, r: int, j: int) -> None:
    """Job j, whose `generated` is up to date, decodes from the next step on."""
    n = ph.replica[r].n_decode
    ph.job[j].state = DECODING
    ph.job[j].joined = ph.replica[r].steps
    ends = ph.replica[r].steps + ph.job[j].output - ph.job[j].generated
    ph.heap_key[r, n] = (ends << ORDER_BITS) | (ph.job[j].order & ((1 << ORDER_BITS) - 1))
    ph.heap_job[r, n] = j
    ph.replica[r].n_decode = n + 1
    sift_up(ph, r, n)
    ph.replica[r].context += ph.job[j].prompt + ph.job[j].generated
    ph.phase[r, (ph.job[j].target - ph.replica[r].steps) & (ph.page - 1)] += 1


@inlined
def leave(ph: Physics, r: int, i: int) -> None:
    """The decoding job at place i of the heap stops; its `generated` is brought up to date.

    Its pages are the caller's; that its blocks may be given back already does not matter to
    `phase`, since a block is a whole number of pages.
    """
    j = ph.heap_job[r, i]
    ph.phase[r, (ph.job[j].target - ph.job[j].joined) & (ph.page - 1)] -= 1
    ph.job[j].generated += ph.replica[r].steps - ph.job[j].joined
    ph.replica[r].context -= ph.job[j].prompt + ph.job[j].generated
    n = ph.replica[r].n_decode - 1
    ph.replica[r].n_decode = n
    if i < n:
        ph.heap_key[r, i] = ph.heap_key[r, n]
        ph.heap_job[r, i] = ph.heap_job[r, n]
        sift_down(ph, r, i)
        sift_up(ph, r, i)


@njit(cache=True, error_model="numpy")
def place_of(ph: Physics, r: int, j: int) -> int:
    """Place of job j in the heap of decoding jobs."""
    for i in range(ph.replica[r].n_decode):
        if ph.heap_job[r, i] == j:
            return i
    return NONE


@njit(cache=True, error_model="numpy")
def preempt_last(ph: Physics, r: int) -> None:
    """The sequence admitted last starts again from the front of the queue."""
    j = ph.replica[r].partial
    if j != NONE:
        ph.replica[r].partial = NONE
        release_room(ph, r, j)
    else:
        last = 0
        for i in range(1, ph.replica[r].n_decode):
            if ph.job[ph.heap_job[r, i]].order > ph.job[ph.heap_job[r, last]].order:
                last = i
        j = ph.heap_job[r, last]
        release_room(ph, r, j)
        leave(ph, r, last)
    ph.job[j].computed = 0
    ph.job[j].target = ph.job[j].prompt + ph.job[j].generated
    ph.replica[r].preemptions += 1
    queue_front(ph, r, j)


@njit(cache=True, error_model="numpy")
def idle_adapter(ph: Physics, r: int) -> int:
    """The resident adapter that no running job uses, least recently used; NONE if there is none."""
    best = np.int64(NONE)
    for a in range(ph.adapter_users.shape[1]):
        if ph.adapter_users[r, a] != 0:
            continue
        if best == NONE or ph.adapter_last[r, a] < ph.adapter_last[r, best]:
            best = a
    return best


@njit(cache=True, error_model="numpy")
def use_adapter(ph: Physics, r: int, a: int, order: int) -> bool:
    """One more running job uses adapter a, loaded if need be; False if no slot can be had."""
    if ph.adapter_users[r, a] == NONE:
        if ph.replica[r].resident < ph.replica[r].lora_slots:
            ph.replica[r].resident += 1
        else:
            out = idle_adapter(ph, r)
            if out == NONE:
                return False
            ph.adapter_users[r, out] = NONE
        ph.adapter_users[r, a] = 0
        ph.replica[r].loading += 1
    ph.adapter_users[r, a] += 1
    ph.adapter_last[r, a] = order
    return True


@njit(cache=True, error_model="numpy")
def admit_head(ph: Physics, r: int, now: float) -> int:
    """Admit the head of the queue if its prompt fits; returns it, or NONE."""
    j = ph.replica[r].head
    moved = ph.job[j].computed >= ph.job[j].target
    hit, idle = 0, 0
    if not moved:
        most = min(ph.job[j].block_high - ph.job[j].block_low, (ph.job[j].target - 1) // ph.block)
        most = min(most, ph.job[j].prompt // ph.block)
        while hit < most:
            holders = ph.holders[r, ph.blocks[ph.job[j].block_low + hit]]
            if holders == NONE:
                break
            if holders == 0:
                idle += 1
            hit += 1
    own = ph.job[j].target - hit * ph.block
    need = pages_for(ph, own)
    grows = pages_for(ph, own + ahead(ph, r)) - need if moved else 0
    if need + grows + growth(ph, r, ahead(ph, r)) > available(ph, r) - idle * ph.block_pages:
        return NONE
    named = ph.job[j].adapter != NONE and ph.replica[r].lora_slots > 0
    if named and not use_adapter(ph, r, ph.job[j].adapter, ph.replica[r].admitted):
        return NONE
    queue_remove(ph, r, j)
    for k in range(hit):
        b = ph.blocks[ph.job[j].block_low + k]
        if ph.holders[r, b] == 0:
            list_remove(ph, r, b)
        ph.holders[r, b] += 1
    ph.job[j].shared = hit
    take_pages(ph, r, need)
    ph.job[j].order = ph.replica[r].admitted
    ph.replica[r].admitted += 1
    if moved:
        join(ph, r, j)
        return j
    ph.job[j].state = PREFILLING
    ph.job[j].computed = hit * ph.block
    if ph.job[j].hits == NONE:
        ph.job[j].hits = hit * ph.block
        ph.job[j].began = now
    return j


@njit(cache=True, error_model="numpy")
def plan(ph: Physics, r: int, now: float) -> None:
    """Form the next stretch of a replica that stands between two steps; it may be idle."""
    ph.replica[r].clock = now
    ph.replica[r].end = np.inf
    ph.replica[r].stretch = 0
    ph.replica[r].n_prefill = 0
    if ph.replica[r].up == 0:
        return
    preempted = False
    ph.replica[r].loading = 0
    while ph.replica[r].n_decode > 0 and growth(ph, r, ahead(ph, r)) > available(ph, r):
        preempt_last(ph, r)
        preempted = True
    budget = ph.replica[r].chunk
    tokens, pairs = 0.0, 0.0
    j = ph.replica[r].partial
    while True:
        if j != NONE:
            new = min(ph.job[j].target - ph.job[j].computed, budget)
            ph.job[j].now_chunk = new
            ph.prefill[r, ph.replica[r].n_prefill] = j
            ph.replica[r].n_prefill += 1
            tokens += new
            pairs += new * (ph.job[j].computed + 0.5 * new)
            budget -= new
        # the next one, if it may come in
        j = NONE
        while budget > 0 and not preempted and ph.replica[r].head != NONE:
            if ph.replica[r].n_decode + ph.replica[r].n_prefill >= ph.replica[r].max_seqs:
                break
            j = admit_head(ph, r, now)
            if j == NONE or ph.job[j].state == PREFILLING:
                break
            j = NONE  # came with its prompt computed elsewhere, and decodes already
        if j == NONE:
            break
    if ph.replica[r].n_prefill == 0 and ph.replica[r].n_decode == 0:
        return
    k = np.int64(1)
    grows = 0.0
    if not preempted:
        if ph.replica[r].n_prefill == 0:
            k = np.int64(1) << 40
        elif ph.replica[r].n_prefill == 1 and budget == 0:
            j = ph.prefill[r, 0]
            k = max((ph.job[j].target - ph.job[j].computed - 1) // ph.replica[r].chunk, 1)
            grows = tokens * ph.replica[r].chunk
    if ph.replica[r].loading > 0:
        k = np.int64(1)
    n = ph.replica[r].n_decode
    ph.replica[r].base = ph.replica[r].overhead + ph.replica[r].per_sequence * n
    ph.replica[r].base += ph.replica[r].lora_load * ph.replica[r].loading
    ph.replica[r].memory_0 = (
        ph.replica[r].weights + ph.replica[r].per_context * ph.replica[r].context
    )
    ph.replica[r].memory_1 = ph.replica[r].per_context * n
    ph.replica[r].gain = ONE
    verified = n
    if ph.replica[r].spec_tokens > 0:
        if n <= ph.replica[r].spec_batch:
            ph.replica[r].gain = ph.replica[r].spec_gain
            verified = n * ahead(ph, r)
            if n > 0:
                ph.replica[r].base += ph.replica[r].spec_draft * ph.replica[r].spec_tokens
        ph.replica[r].memory_0 += ph.replica[r].per_context * n * ph.replica[r].credit / ONE
        ph.replica[r].memory_1 *= ph.replica[r].gain / ONE
    if ph.replica[r].experts > 0.0:
        ph.replica[r].base += (
            ph.replica[r].experts
            * (verified + tokens)
            / (verified + tokens + ph.replica[r].expert_tokens)
        )
    if ph.replica[r].per_uneven > 0.0:
        ph.replica[r].memory_0 += ph.replica[r].per_uneven * unevenness(ph, r)
    ph.replica[r].compute_0 = (
        ph.replica[r].per_token * (verified + tokens) + ph.replica[r].per_attention * pairs
    )
    ph.replica[r].compute_1 = ph.replica[r].per_attention * grows
    if n > 0:
        k = min(k, steps_to_give(ph, r, (ph.heap_key[r, 0] >> ORDER_BITS) - ph.replica[r].steps))
        room = available(ph, r)
        most = n * ((gained(ph, r, k) + ahead(ph, r)) >> ph.page_shift) + n  # pages, rounded up
        if most > room and not enough(ph, r, k, room):
            low, high = np.int64(1), k
            while high - low > 1:
                mid = (low + high) // 2
                if enough(ph, r, mid, room):
                    low = mid
                else:
                    high = mid
            k = low
    ph.replica[r].stretch = k
    ph.replica[r].end = now + span(ph, r, k)


@inlined
def steps_to_give(ph: Physics, r: int, tokens: int) -> int:
    """Steps of the present stretch's gain after which each sequence has so many tokens more."""
    if ph.replica[r].gain == ONE:
        return tokens
    return ((tokens << 16) - ph.replica[r].credit + ph.replica[r].gain - 1) // ph.replica[r].gain


@njit(cache=True, error_model="numpy")
def enough(ph: Physics, r: int, k: int, room: int) -> bool:
    """Whether `room` pages do for the k-th step to begin."""
    return growth(ph, r, gained(ph, r, k - 1) + ahead(ph, r)) <= room


@njit(cache=True, error_model="numpy")
def unevenness(ph: Physics, r: int) -> float:
    """Decoding sequences x longest context - sum of contexts, in tokens."""
    longest = np.int64(0)
    for i in range(ph.replica[r].n_decode):
        j = ph.heap_job[r, i]
        context = ph.job[j].prompt + ph.job[j].generated + ph.replica[r].steps - ph.job[j].joined
        longest = max(longest, context)
    return ph.replica[r].n_decode * longest - ph.replica[r].context


# ---- what callers use


@inlined
def set_job(
    ph: Physics, j: int, prompt: int, output: int, decode_on: int, block_low: int, block_high: int
) -> None:
    """Describe job j: tokens, the replica that decodes it (NONE: where it prefills), its blocks."""
    ph.job[j].prompt = prompt
    ph.job[j].output = output
    ph.job[j].decode_on = decode_on
    ph.job[j].block_low = block_low
    ph.job[j].block_high = block_high
    ph.job[j].state = ABSENT
    ph.job[j].where = NONE
    ph.job[j].target = prompt
    ph.job[j].computed = 0
    ph.job[j].generated = 0
    ph.job[j].shared = 0
    ph.job[j].hits = NONE
    ph.job[j].began = np.inf
    ph.job[j].adapter = NONE


@njit(cache=True, error_model="numpy")
def set_adapter(ph: Physics, j: int, adapter: int) -> None:
    """Job j, just set, needs this adapter."""
    ph.job[j].adapter = adapter


@inlined
def fits(ph: Physics, r: int, j: int) -> bool:
    """Whether replica r could ever serve job j."""
    total = ph.job[j].prompt + ph.job[j].output
    return total <= ph.replica[r].max_context and pages_for(ph, total) <= ph.replica[r].pages


@inlined
def enter(ph: Physics, r: int, j: int, now: float) -> bool:
    """Job j reaches replica r; False if r is down or could never hold it.

    The caller calls `plan` if the replica stands between two steps.
    """
    if ph.replica[r].up == 0 or not fits(ph, r, j):
        return False
    ph.job[j].where = r
    if ph.replica[r].n_waiting == 0 and ph.replica[r].n_prefill == 0:
        truncate(ph, r, now)
    queue_back(ph, r, j)
    return True


@njit(cache=True, error_model="numpy")
def idle(ph: Physics, r: int) -> bool:
    """Whether replica r stands between two steps."""
    return ph.replica[r].stretch == 0


@njit(cache=True, error_model="numpy")
def drop(ph: Physics, r: int, j: int) -> None:
    """Job j leaves r for good, between two steps."""
    state = ph.job[j].state
    if state == WAITING:
        queue_remove(ph, r, j)
    elif state == DECODING:
        i = place_of(ph, r, j)
        release_room(ph, r, j)
        leave(ph, r, i)
    elif state == PREFILLING:
        release_room(ph, r, j)
        if ph.replica[r].partial == j:
            ph.replica[r].partial = NONE
    ph.job[j].state = DONE


@njit(cache=True, error_model="numpy")
def abort(ph: Physics, j: int, now: float) -> None:
    """The client of job j is gone; its room is free at the end of the running step."""
    r, state = ph.job[j].where, ph.job[j].state
    if state in (ABSENT, DONE):
        return
    if state == MOVING:
        ph.job[j].state = DONE  # found dead on delivery
        return
    if state == DECODING:
        ph.job[j].decode_on = NONE  # where it was to be handed over
    truncate(ph, r, now)
    if state == WAITING or ph.replica[r].stretch == 0:
        drop(ph, r, j)
        return
    for i in range(ph.replica[r].n_doomed):
        if ph.doomed[r, i] == j:
            return
    ph.doomed[r, ph.replica[r].n_doomed] = j
    ph.replica[r].n_doomed += 1


@njit(cache=True, error_model="numpy")
def hand_over(ph: Physics, j: int, to: int, now: float) -> bool:
    """Job j, which decodes, goes on on replica `to`; False if it does not decode, is there already
    or about to leave. It leaves at the end of the running step, unless that ends it, and is LOST
    where `to` cannot take it.
    """
    r = ph.job[j].where
    if ph.job[j].state != DECODING or ph.job[j].decode_on != NONE or to == r:
        return False
    for i in range(ph.replica[r].n_doomed):
        if ph.doomed[r, i] == j:
            return False
    ph.job[j].decode_on = to
    truncate(ph, r, now)
    if ph.replica[r].stretch == 0:
        carry_off(ph, r, j, now)
    else:
        ph.doomed[r, ph.replica[r].n_doomed] = j
        ph.replica[r].n_doomed += 1
    return True


@njit(cache=True, error_model="numpy")
def carry_off(ph: Physics, r: int, j: int, now: float) -> None:
    """Job j stops decoding on r, between two steps; its KV goes to where it is handed over."""
    i = place_of(ph, r, j)
    tokens = ph.job[j].target + ph.replica[r].steps - ph.job[j].joined
    release_room(ph, r, j)
    leave(ph, r, i)
    ph.job[j].target = tokens
    ph.job[j].computed = tokens
    send_off(ph, j, now + tokens * ph.move_per_token + ph.move_latency)


@njit(cache=True, error_model="numpy")
def move_out(ph: Physics, r: int, j: int, now: float) -> None:
    """Job j's prompt is done on r; its KV goes on to the replica that decodes it."""
    release_room(ph, r, j)
    moved = ph.job[j].target * ph.move_per_token
    tail = ph.job[j].now_chunk * ph.move_per_token / ph.layers
    send_off(ph, j, max(now + tail, ph.job[j].began + moved) + ph.move_latency)


@njit(cache=True, error_model="numpy")
def send_off(ph: Physics, j: int, at: float) -> None:
    """Job j is on its way, and there by `at`; of equals who left first arrives first."""
    ph.job[j].state = MOVING
    i = ph.n_moving[0]
    ph.n_moving[0] += 1
    while i > 0 and ph.ready_at[i - 1] <= at:
        ph.ready_at[i] = ph.ready_at[i - 1]
        ph.ready_job[i] = ph.ready_job[i - 1]
        i -= 1
    ph.ready_at[i], ph.ready_job[i] = at, j


@njit(cache=True, error_model="numpy")
def deliver(ph: Physics, kinds: Ints, jobs: Ints) -> int:
    """The first job on its way arrives where it decodes.

    Writes DELIVERED, or LOST if that replica is down; returns how many (0 for an aborted one). The
    caller plans the replica `where[job]` if it is idle.
    """
    n = ph.n_moving[0] - 1
    ph.n_moving[0] = n
    at, j = ph.ready_at[n], ph.ready_job[n]
    if ph.job[j].state != MOVING:
        return 0
    d = ph.job[j].decode_on
    jobs[0] = j
    kinds[0] = DELIVERED
    ph.job[j].decode_on = NONE
    if not enter(ph, d, j, at):
        ph.job[j].state = DONE
        kinds[0] = LOST
    return 1


@njit(cache=True, error_model="numpy")
def fire(ph: Physics, r: int, kinds: Ints, jobs: Ints) -> int:
    """The present stretch of r is over: writes its events, returns how many.

    `kinds` and `jobs` need 2 x max_seqs places. The replica then stands between two steps; the
    caller acts on the events and calls `plan`.
    """
    k, now = ph.replica[r].stretch, ph.replica[r].end
    ph.replica[r].busy += now - ph.replica[r].clock
    ph.replica[r].clock = now
    ph.replica[r].stretch = 0
    ph.replica[r].end = np.inf
    given = gained(ph, r, k)
    if ph.replica[r].n_decode > 0:
        take_pages(ph, r, growth(ph, r, given))
        ph.replica[r].credit = (ph.replica[r].credit + k * ph.replica[r].gain) & (ONE - 1)
        ph.replica[r].steps += given
        ph.replica[r].context += ph.replica[r].n_decode * given
    count = 0
    for i in range(ph.replica[r].n_doomed):
        drop_doomed(ph, r, ph.doomed[r, i], k, now)
    ph.replica[r].n_doomed = 0
    while ph.replica[r].n_decode > 0 and (ph.heap_key[r, 0] >> ORDER_BITS) <= ph.replica[r].steps:
        j = ph.heap_job[r, 0]
        release_room(ph, r, j)
        leave(ph, r, 0)
        ph.job[j].state = DONE
        kinds[count], jobs[count] = FINISHED, j
        count += 1
    ph.replica[r].partial = NONE
    for i in range(ph.replica[r].n_prefill):
        j = ph.prefill[r, i]
        if ph.job[j].state != PREFILLING:
            continue
        ph.job[j].computed += ph.job[j].now_chunk * k
        share_computed(ph, r, j)
        if ph.job[j].computed < ph.job[j].target:
            ph.replica[r].partial = j
            continue
        ph.job[j].generated += 1
        if ph.job[j].generated == 1:
            kinds[count], jobs[count] = FIRST_TOKEN, j
            count += 1
        if ph.job[j].generated >= ph.job[j].output:
            release_room(ph, r, j)
            ph.job[j].state = DONE
            kinds[count], jobs[count] = FINISHED, j
            count += 1
        elif ph.job[j].decode_on != NONE and ph.job[j].decode_on != r:
            move_out(ph, r, j, now)
        else:
            join(ph, r, j)
    ph.replica[r].n_prefill = 0
    return count


@njit(cache=True, error_model="numpy")
def drop_doomed(ph: Physics, r: int, j: int, k: int, now: float) -> None:
    """An aborted job leaves at the end of the step; what it computed stays shareable. One that is
    handed over goes on its way, unless it has ended.
    """
    if ph.job[j].state == DECODING and ph.job[j].decode_on != NONE:
        ends = ph.job[j].joined + ph.job[j].output - ph.job[j].generated
        if ends > ph.replica[r].steps:
            carry_off(ph, r, j, now)
        return
    if ph.job[j].state == PREFILLING:
        ph.job[j].computed = min(ph.job[j].computed + ph.job[j].now_chunk * k, ph.job[j].target)
        share_computed(ph, r, j)
    drop(ph, r, j)


@njit(cache=True, error_model="numpy")
def kill(ph: Physics, r: int, now: float, jobs: Ints) -> int:
    """Replica r dies: everything on it is lost at once, its cache too; writes the jobs, returns how
    many. `jobs` needs as many places as there are jobs.
    """
    if ph.replica[r].stretch > 0:
        ph.replica[r].busy += now - ph.replica[r].clock
    for i in range(ph.replica[r].n_doomed):
        j = ph.doomed[r, i]
        if ph.job[j].state != DECODING or ph.job[j].decode_on == NONE:
            drop(ph, r, j)
    count = 0
    for i in range(ph.replica[r].n_decode):
        jobs[count] = ph.heap_job[r, i]
        count += 1
    for i in range(ph.replica[r].n_prefill):
        if ph.job[ph.prefill[r, i]].state == PREFILLING:
            jobs[count] = ph.prefill[r, i]
            count += 1
    if ph.replica[r].stretch == 0 and ph.replica[r].partial != NONE:
        jobs[count] = ph.replica[r].partial
        count += 1
    j = ph.replica[r].head
    while j != NONE:
        jobs[count] = j
        count += 1
        j = ph.job[j].next_job
    for i in range(count):
        ph.job[jobs[i]].state = DONE
        ph.job[jobs[i]].shared = 0
    ph.replica[r].up = 0
    ph.replica[r].clock = now
    ph.replica[r].end = np.inf
    ph.replica[r].stretch = 0
    ph.replica[r].n_decode = 0
    ph.replica[r].n_prefill = 0
    ph.replica[r].n_doomed = 0
    ph.replica[r].context = 0.0
    ph.replica[r].free = ph.replica[r].pages
    ph.replica[r].evictable = 0
    ph.replica[r].head = NONE
    ph.replica[r].tail = NONE
    ph.replica[r].n_waiting = 0
    ph.replica[r].partial = NONE
    ph.replica[r].oldest = NONE
    ph.replica[r].newest = NONE
    ph.replica[r].credit = 0
    ph.replica[r].resident = 0
    ph.phase[r, :] = 0
    ph.holders[r, :] = NONE
    ph.adapter_users[r, :] = NONE
    return count


@njit(cache=True, error_model="numpy")
def revive(ph: Physics, r: int) -> None:
    """Replica r serves again, empty; what it does until then (warm-up) is the caller's to time."""
    ph.replica[r].up = 1


@njit(cache=True, error_model="numpy")
def tokens_out(ph: Physics, j: int, now: float) -> int:
    """Whole tokens that job j has given by `now`; looking changes nothing."""
    given = ph.job[j].generated
    if ph.job[j].state == DECODING:
        r = ph.job[j].where
        given += ph.replica[r].steps - ph.job[j].joined + tokens_done(ph, r, now)
    return given


@njit(cache=True, error_model="numpy")
def progress_into(ph: Physics, now: float, replicas: Ints, jobs: Ints, counts: Ints) -> int:
    """Whole tokens of every decoding job by `now`; returns how many were written."""
    n = 0
    for r in range(len(ph.replica)):
        if ph.replica[r].n_decode == 0:
            continue
        done = ph.replica[r].steps + tokens_done(ph, r, now)
        for i in range(ph.replica[r].n_decode):
            j = ph.heap_job[r, i]
            replicas[n] = r
            jobs[n] = j
            counts[n] = ph.job[j].generated + done - ph.job[j].joined
            n += 1
    return n


@njit(cache=True, error_model="numpy")
def next_event(ph: Physics) -> tuple[float, int]:
    """(time, replica) of the next event; the replica is NONE for an arrival of moved KV."""
    r, at = 0, ph.replica[0].end
    for i in range(1, len(ph.replica)):
        if ph.replica[i].end < at:
            r, at = i, ph.replica[i].end
    n = ph.n_moving[0]
    if n > 0 and ph.ready_at[n - 1] < at:
        return ph.ready_at[n - 1], np.int64(NONE)
    return at, r


@njit(cache=True, error_model="numpy")
def next_step(ph: Physics, r: int, now: float) -> float:
    """When the step that runs at `now` ends; inf when idle."""
    if ph.replica[r].stretch == 0:
        return np.inf
    if now >= ph.replica[r].end:
        return ph.replica[r].end
    return ph.replica[r].clock + span(ph, r, steps_before(ph, r, now, True) + 1)


@njit(cache=True, error_model="numpy")
def reading_into(ph: Physics, r: int, now: float, out: Floats) -> None:
    """What the replica's own metrics show: (running, waiting, share of KV pages in use) into out
    (3,).
    """
    replica = ph.replica[r]
    out[0] = replica.n_decode + replica.n_prefill
    out[1] = replica.n_waiting
    taken = growth(ph, r, tokens_done(ph, r, now)) if replica.n_decode > 0 else 0
    room = replica.free + replica.evictable * ph.block_pages - taken
    out[2] = 1.0 - room / max(replica.pages, 1)
