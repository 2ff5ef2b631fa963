"""Recorded metric texts (ours, in each engine's dialect) read as they are meant."""

import asyncio

import orjson
import pytest

from backends.adapters.detect import ADAPTERS, adapter_named, discover, recognise
from backends.adapters.llamacpp import LLAMACPP
from backends.adapters.openai import OPENAI
from backends.adapters.table import Load, kv_capacity, read_load, samples
from backends.adapters.vllm import VLLM
from backends.wire.openai import SALT_FIELDS

LLAMACPP_TEXT = """# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
llamacpp:requests_deferred 3
llamacpp:prompt_tokens_total 512
"""
VLLM_TEXT = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",note="a \\"b\\", c",num_gpu_blocks="1000"} 1.0
"""
OLD_VLLM_TEXT = "vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.125\n"


@pytest.mark.parametrize(
    ("adapter", "text", "load"),
    [
        (LLAMACPP, LLAMACPP_TEXT, Load(running=2, waiting=3)),
        (VLLM, VLLM_TEXT, Load(running=5, waiting=0, kv_used=0.5)),
        (VLLM, OLD_VLLM_TEXT, Load(running=1, kv_used=0.125)),
        (OPENAI, "anything 1\n", Load()),
        (VLLM, "", Load()),
    ],
)
def test_load_is_read_and_absent_is_unknown(adapter, text, load):
    assert read_load(adapter, text) == load


def test_labels_with_quotes_and_commas():
    sample = samples(VLLM_TEXT)[-1]
    assert sample.labels["note"] == 'a "b", c'
    assert sample.value == 1.0
    assert kv_capacity(VLLM, VLLM_TEXT) == 16_000
    assert kv_capacity(VLLM, OLD_VLLM_TEXT) is None
    assert kv_capacity(LLAMACPP, LLAMACPP_TEXT) is None


@pytest.mark.parametrize("text", ["x", "x{", 'x{a="', "x{} ", "x nope", "{} 1", "\x00"])
def test_broken_lines_are_passed_over(text):
    assert read_load(LLAMACPP, text + "\nllamacpp:requests_processing 1") == Load(running=1)


def test_names_are_unique_and_found():
    assert [adapter_named(a.name) for a in ADAPTERS] == list(ADAPTERS)
    with pytest.raises(ValueError, match="unknown engine 'vlm'; known: llamacpp, vllm, openai"):
        adapter_named("vlm")


def test_only_engines_with_a_salt_name_one_and_bodies_are_searched_for_it():
    named = {a.name: a.cache_salt for a in ADAPTERS}
    assert named == {"llamacpp": None, "vllm": "cache_salt", "openai": None}
    assert {a.cache_salt for a in ADAPTERS} - {None} == SALT_FIELDS


def site(**pages):
    async def get(path):
        page = pages.get(path.strip("/").replace("/", "_"))
        return orjson.dumps(page) if isinstance(page, dict) else page

    return get


def test_llamacpp_tells_slots_and_context():
    found = asyncio.run(
        discover(
            site(
                v1_models={"data": [{"id": "smol", "owned_by": "llamacpp"}]},
                props={"total_slots": 4, "default_generation_settings": {"n_ctx": 2048}},
            )
        )
    )
    assert (found.adapter, found.models) == (LLAMACPP, ("smol",))
    assert (found.max_seqs, found.max_context, found.kv_capacity) == (4, 2048, None)


def test_vllm_tells_context_and_cache():
    found = asyncio.run(
        discover(
            site(
                v1_models={"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 8192}]},
                metrics=VLLM_TEXT.encode(),
            )
        )
    )
    assert (found.adapter, found.max_context, found.kv_capacity) == (VLLM, 8192, 16_000)


def test_metric_names_give_an_engine_away_behind_a_proxy():
    assert recognise({"someone"}, VLLM_TEXT) is VLLM
    assert recognise({"someone"}, "") is OPENAI


@pytest.mark.parametrize("body", [None, b"", b"<html>", b"[]", b'{"data": 3}', b'{"data": []}'])
def test_no_models_is_no_engine(body):
    assert asyncio.run(discover(site(v1_models=body))) is None
