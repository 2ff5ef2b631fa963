"""Step tables as families: the data sets `engine_aiconfigurator_grid`, `engine_vidur_profiles` and
`engine_splitwise_profile`, or a table of one's own with the columns of the first.

A row is one forward step. Nothing here is fitted; licences stand in the README beside each set and
in `SETS`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from domain.errors import ConfigError
from domain.fleet import ProfileKey
from training.calibrate import Family, Floats, Steps
from training.trace_sources import columns

GIB = 2.0**30
KEY = ("gpu", "engine", "model", "weight_dtype", "tp")
SHAPE = ("phase", "batch", "new_tokens_per_seq", "cached_tokens_per_seq")


class Device(NamedTuple):
    """A GPU: memory in bytes, bandwidth in bytes/s, dense BF16 FLOP/s and power in watts, by its
    vendor's data sheet; price relative to an H100's 2.5, nominal.
    """

    memory: float
    bandwidth: float
    flops: float
    power: float
    price: float


DEVICES = {
    "a100": Device(80e9, 2.04e12, 312e12, 400, 1.5),
    "a40": Device(48e9, 0.696e12, 150e12, 300, 0.8),
    "h100": Device(80e9, 3.35e12, 989e12, 700, 2.5),
    "h200": Device(141e9, 4.8e12, 989e12, 700, 3.2),
    "b200": Device(180e9, 7.7e12, 2250e12, 1000, 4.5),
    "b300": Device(270e9, 7.7e12, 2250e12, 1100, 5.0),
    "gb200": Device(186e9, 8.0e12, 2500e12, 1200, 4.8),
    "gb300": Device(279e9, 8.0e12, 2500e12, 1400, 5.3),
    "l40s": Device(48e9, 0.864e12, 362e12, 350, 0.9),
    "rtx_pro_6000": Device(96e9, 1.79e12, 503e12, 600, 1.3),
    "rtx4090": Device(24e9, 1.008e12, 165e12, 450, 0.4),
}


class Source(NamedTuple):
    """Where a set comes from."""

    source: str
    licence: str


SETS = {
    "engine_aiconfigurator_grid": Source(
        "engine_aiconfigurator_grid: steps computed with aiconfigurator 0.12.0 from NVIDIA's "
        "kernel timings (modelled from measured kernels, no end-to-end run)",
        "Apache-2.0 (NVIDIA)",
    ),
    "engine_vidur_profiles": Source(
        "engine_vidur_profiles: layer operations and collectives of microsoft/vidur 7d475133; "
        "attention is not in the set, so per_context and per_attention are roofline estimates",
        "MIT, copyright Microsoft Corporation",
    ),
    "engine_splitwise_profile": Source(
        "engine_splitwise_profile: measured by Mutinifni/splitwise-sim 8f99e7dc",
        "MIT, copyright 2024 Pratyush Patel",
    ),
}


def device(gpu: str) -> Device:
    """The data sheet of a GPU as the sets name it. Raises: ConfigError for one unknown."""
    name = gpu.lower().removesuffix("_sxm").removesuffix("_server").replace("rtxpro", "rtx_pro_")
    for part in ("-80gb-pcap", "-80gb"):
        name = name.removesuffix(part)
    if name not in DEVICES:
        raise ConfigError(f"unknown GPU {gpu!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]


def short(model: str) -> str:
    """A model's name in a profile's: `meta-llama/Meta-Llama-3.1-8B` is `llama-3.1-8b`."""
    return model.rsplit("/", maxsplit=1)[-1].lower().removeprefix("meta-").removesuffix("-hf")


# ---- the grid, and tables like it


def grid(table: dict[str, Any], where: str) -> list[Family]:
    """Families of a table with the grid's columns: `KEY`, `SHAPE` and latency_ms, and where they
    are, memory_gib_per_gpu and exceeds_memory.

    Raises: ConfigError naming `where` and the column or the row that is wrong.
    """
    missing = [n for n in (*KEY, *SHAPE, "latency_ms") if n not in table]
    if missing:
        raise ConfigError(f"{where}: a step table has a column {missing[0]!r}")
    numbers = {n: _numbers(table[n], n, where) for n in (*SHAPE[1:], "latency_ms")}
    phase = np.asarray(table["phase"], str)
    wrong = np.flatnonzero((phase != "prefill") & (phase != "decode"))
    if len(wrong):
        raise ConfigError(
            f"{where}: phase of row {wrong[0] + 1} is {str(phase[wrong[0]])!r}; prefill or decode"
        )
    bad = np.flatnonzero(~(numbers["latency_ms"] > 0))
    if len(bad):
        raise ConfigError(
            f"{where}: latency_ms of row {bad[0] + 1} is {numbers['latency_ms'][bad[0]]}; "
            "a step takes time"
        )
    keys = list(zip(*(np.asarray(table[n]).tolist() for n in KEY), strict=True))
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    return [
        _grid_family(key, np.array(index), phase, numbers, table) for key, index in rows.items()
    ]


def _grid_family(
    key: tuple[Any, ...],
    index: Any,
    phase: Any,
    numbers: dict[str, Floats],
    table: dict[str, Any],
) -> Family:
    gpu, engine, model, precision, tp = key
    decode = phase[index] == "decode"
    batch, new, cached, ms = (numbers[n][index] for n in (*SHAPE[1:], "latency_ms"))
    steps = Steps(
        batch=np.where(decode, batch, 0.0),
        context=np.where(decode, batch * cached, 0.0),
        prefill=np.where(decode, 0.0, batch * new),
        pairs=np.where(decode, 0.0, batch * new * (cached + new / 2.0)),
        seconds=ms * 1e-3,
    )
    name = f"{gpu}-{engine}-{short(str(model))}-{precision}-tp{int(tp)}"
    limits: dict[str, float] = {"max_context": float((cached + new).max()), "chunk": 2048.0}
    if "memory_gib_per_gpu" in table:
        limits |= _memory_limits(str(gpu), int(tp), steps, table["memory_gib_per_gpu"][index])
    return Family(
        name=name,
        key=ProfileKey(
            gpu=str(gpu), engine=str(engine), model=str(model), precision=str(precision), tp=int(tp)
        ),
        steps=steps,
        shapes=np.stack([decode.astype(float), batch, new, cached], axis=1),
        limits=limits,
    )


def _memory_limits(gpu: str, tp: int, steps: Steps, memory_gib: Any) -> dict[str, float]:
    """KV room from the modelled memory of decode steps, a line in context: 90 % of the GPU less
    what is there at no context. Power and price of the layout.
    """
    decode = steps.batch > 0
    slope, fixed = np.polyfit(steps.context[decode], np.asarray(memory_gib, float)[decode], 1)
    card = device(gpu)
    room = (0.9 * card.memory / GIB - fixed) / max(slope, 1e-12)
    return {
        "kv_capacity": float(np.clip(room, 1.0, 1e7)),
        "power": card.power * tp,
        "price": card.price * tp,
    }


def _numbers(values: Any, name: str, where: str) -> Floats:
    out = []
    for i, value in enumerate(np.asarray(values).tolist()):
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not number >= 0:
            raise ConfigError(f"{where}: {name} of row {i + 1} is {value!r}; a number, 0 or more")
        out.append(number)
    return np.array(out)


def read_table(path: Path) -> list[Family]:
    """Families of one's own table, CSV or Parquet, with the columns of the grid.

    Raises: ConfigError naming the file for anything that is wrong with it.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix == ".parquet":
        table = columns(path)
    else:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
        table = {n: [line[n] for line in lines] for n in reader.fieldnames or ()}
        if not lines:
            raise ConfigError(f"{path}: an empty table")
    return grid(table, str(path))


# ---- Vidur


_LAYERS = {
    "Qwen/Qwen-72B": 80,
    "codellama/CodeLlama-34b-Instruct-hf": 48,
    "internlm/internlm-20b": 60,
    "meta-llama/Llama-2-70b-hf": 80,
    "meta-llama/Llama-2-7b-hf": 32,
    "meta-llama/Meta-Llama-3-70B": 80,
    "meta-llama/Meta-Llama-3-8B": 32,
    "microsoft/phi-2": 32,
}
"""Decoder layers by the models' published configurations."""


def vidur(data: Path) -> list[Family]:
    """Steps of dense models without attention: layers x (operations + two all-reduces) + embedding.

    No all-reduce was measured on A40, so its tensor-parallel families hold the operations alone.
    """
    folder = data / "engine_vidur_profiles"
    ops, moves = columns(folder / "linear_ops.parquet"), columns(folder / "collectives.parquet")
    names = ("gpu", "model_name", "num_tensor_parallel_workers")
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(zip(*(ops[n].tolist() for n in names), strict=True)):
        rows.setdefault(key, []).append(i)
    return [
        _vidur_family(key, {n: c[index] for n, c in ops.items()}, moves)
        for key, index in ((k, np.array(v)) for k, v in rows.items())
    ]


def _vidur_family(key: tuple[Any, ...], ops: dict[str, Any], moves: dict[str, Any]) -> Family:
    gpu, model, tp = str(key[0]), str(key[1]), int(key[2])
    layers = _LAYERS[model]
    tokens = ops["num_tokens"].astype(float)
    ms = layers * ops["linear_ops_per_layer_ms"].astype(float) + ops["emb_ms"].astype(float)
    width = float(ops["n_embd"][0])
    ms = ms + 2.0 * layers * _all_reduce_ms(moves, gpu, tp, tokens * width * 2.0)
    none = np.zeros(len(tokens))
    card, heads = device(gpu), float(ops["n_head"][0])
    head, kv_heads = width / heads, float(ops["n_kv_head"][0])
    kv = 2.0 * layers * max(kv_heads / tp, 1.0) * head * 2.0
    inner, gates = float(ops["n_expanded_embd"][0]), 3.0 if ops["use_gated_mlp"][0] else 2.0
    attention = width * width * 2.0 + 2.0 * width * kv_heads * head
    parameters = layers * (attention + gates * width * inner) + 2 * width * ops["vocab_size"][0]
    return Family(
        name=f"{gpu}-vidur-{short(model)}-fp16-tp{tp}",
        key=ProfileKey(gpu=gpu, engine="vidur", model=model, precision="fp16", tp=tp),
        steps=Steps(none, none, tokens, none, ms * 1e-3),
        shapes=tokens[:, None],
        limits={
            "max_context": 4096.0,
            "chunk": 2048.0,
            "kv_capacity": max(1.0, (0.9 * card.memory - 2.0 * parameters / tp) / kv),
            "power": card.power * tp,
            "price": card.price * tp,
        },
        known={
            "per_context": kv / (0.75 * card.bandwidth),
            "per_attention": 4.0 * layers * width / tp / (0.5 * card.flops),
        },
    )


def _all_reduce_ms(moves: dict[str, Any], gpu: str, tp: int, size: Floats) -> Floats:
    """Milliseconds of one all-reduce of that many bytes, interpolated; 0 where nothing was
    measured.

    On A100 each size was measured in two placements, one many times slower; workers of a replica
    share NVLink, so the faster counts.
    """
    for node in (f"{gpu}_dgx", f"{gpu}_pairwise_nvlink"):
        chosen = (moves["collective_kind"] == "all_reduce") & (moves["num_workers"] == tp)
        chosen &= moves["node"] == node
        if chosen.any():
            at, place = np.unique(moves["size"][chosen], return_inverse=True)
            least = np.full(len(at), np.inf)
            np.minimum.at(least, place, moves["all_reduce_ms"][chosen].astype(float))
            out: Floats = np.interp(size, at.astype(float), least)
            return out
    return np.zeros(len(size))


# ---- Splitwise


def splitwise(data: Path) -> list[Family]:
    """Prompt and token times of Llama2-70B and BLOOM-176B; repeats by their median.

    A token's context is the prompt and half of what was generated.
    """
    table = columns(data / "engine_splitwise_profile" / "splitwise_perf.parquet")
    names = ("hardware", "model", "tensor_parallel", "prompt_size", "token_size", "batch_size")
    times: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for *key, prompt_ms, token_ms in zip(
        *(table[n].tolist() for n in (*names, "prompt_time_ms", "token_time_ms")), strict=True
    ):
        times.setdefault(tuple(key), []).append((prompt_ms, token_ms))
    families: dict[tuple[Any, ...], list[tuple[float, ...]]] = {}
    for (gpu, model, tp, prompt, tokens, batch), repeats in times.items():
        prompt_ms, token_ms = np.median(np.array(repeats), axis=0).tolist()
        families.setdefault((gpu, model, tp), []).append(
            (prompt, tokens, batch, prompt_ms, token_ms)
        )
    return [_splitwise_family(key, np.array(rows)) for key, rows in families.items()]


def _splitwise_family(key: tuple[Any, ...], rows: Floats) -> Family:
    gpu, model, tp = str(key[0]), str(key[1]), int(key[2])
    prompt, tokens, batch, prompt_ms, token_ms = rows.T
    none, n, card = np.zeros(len(rows)), len(rows), device(gpu)
    context = prompt + tokens / 2.0
    llama = "llama" in model
    parameters, kv = (69e9, 2 * 80 * 8 * 128 * 2.0) if llama else (176e9, 2 * 70 * 112 * 128 * 2.0)
    return Family(
        name=f"{gpu}-splitwise-{short(model)}-fp16-tp{tp}",
        key=ProfileKey(gpu=gpu, engine="splitwise", model=model, precision="fp16", tp=tp),
        steps=Steps(
            batch=np.concatenate([none, batch]),
            context=np.concatenate([none, batch * context]),
            prefill=np.concatenate([batch * prompt, none]),
            pairs=np.concatenate([batch * prompt * prompt / 2.0, none]),
            seconds=np.concatenate([prompt_ms, token_ms]) * 1e-3,
        ),
        shapes=np.concatenate(
            [
                np.stack([none, batch, prompt, none], 1),
                np.stack([none + 1, batch, np.ones(n), context], 1),
            ]
        ),
        experts=False,
        limits={
            "max_context": 8192.0,
            "chunk": 2048.0,
            "max_seqs": 64.0,
            "kv_capacity": max(1.0, (0.9 * card.memory * tp - 2.0 * parameters) / kv),
            "power": card.power * tp,
            "price": card.price * tp,
        },
    )


def every_set(data: Path) -> Iterator[tuple[str, list[Family]]]:
    """(data set, its families) of all three.

    Raises: FileNotFoundError that says where it looked.
    """
    path = data / "engine_aiconfigurator_grid" / "step_latency.parquet"
    yield "engine_aiconfigurator_grid", grid(columns(path), str(path))
    yield "engine_vidur_profiles", vidur(data)
    yield "engine_splitwise_profile", splitwise(data)
