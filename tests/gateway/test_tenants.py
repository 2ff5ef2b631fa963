"""Keys open exactly what they should, and no secret ever reaches a message."""

import re
from pathlib import Path

import pytest

from domain.errors import ConfigError, Unauthenticated
from domain.request import Quota
from gateway.tenants import AdminKey, KeyTable, hash_of, key_table, load_tenants, new_key

EXAMPLE = Path(__file__).parents[2] / "configs" / "tenants.yaml"


def file(tmp_path, text):
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    return path


def bearer(key):
    return f"Bearer {key}".encode()


@pytest.fixture
def keys():
    return [new_key() for _ in range(3)]


@pytest.fixture
def table(tmp_path, keys):
    text = f"""
tenants:
  a:
    keys:
      one: {{hash: "{keys[0].hash}", quota: {{concurrency: 2}}}}
      two: {{hash: "{keys[1].hash}"}}
  b:
    class: batch
    models: [m]
    model_quotas: {{m: {{tokens_per_minute: 10}}}}
    keys: {{one: {{hash: "{keys[2].hash}"}}}}
"""
    return key_table(load_tenants(file(tmp_path, text)))


def test_a_key_names_its_tenant_and_itself(table, keys):
    found = [table.identify(bearer(k.key)) for k in keys]
    assert [(i.tenant.name, i.key) for i in found] == [("a", "one"), ("a", "two"), ("b", "one")]
    assert found[0].tenant.key_quotas == {"one": Quota(concurrency=2)}
    assert found[2].tenant.models == {"m"}
    assert found[2].tenant.model_quotas == {"m": Quota(tokens_per_minute=10.0)}


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic abc"])
def test_no_key_opens_nothing(table, header):
    with pytest.raises(Unauthenticated):
        table.identify(header)


def test_a_wrong_key_opens_nothing_and_neither_does_a_hash(table, keys):
    for wrong in (keys[0].key + "x", keys[0].key[:-1], keys[0].hash, "0" * 64):
        with pytest.raises(Unauthenticated) as caught:
            table.identify(bearer(wrong))
        assert wrong not in str(caught.value)


def test_the_scheme_is_read_in_any_case(table, keys):
    assert table.identify(b"bearer " + keys[0].key.encode()).key == "one"


def test_without_tenants_everybody_is_anonymous():
    identity = KeyTable((), {}).identify(None)
    assert (identity.tenant.name, identity.key) == ("anonymous", None)


def test_new_keys_are_long_and_differ(keys):
    assert len({k.key for k in keys}) == 3
    for key, hashed in keys:
        assert key.startswith("sk-sluice-")
        assert len(key) >= 50
        assert hashed == hash_of(key)


def test_a_key_written_into_the_file_is_refused_and_not_repeated(tmp_path):
    key = new_key().key
    path = file(tmp_path, f"tenants: {{a: {{keys: {{one: {{hash: {key}}}}}}}}}")
    with pytest.raises(ConfigError, match=r"tenants\.a\.keys\.one\.hash.*sluice key") as caught:
        load_tenants(path)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {a: {keys: {}, quotas: {}}}",
        "tenants: {a: {quota: {concurrency: -1}}}",
        "tenants: {'a b': {}}",
        "tenants: {a: {weight: 0}}",
        "]",
        "",
    ],
)
def test_bad_files_are_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        load_tenants(file(tmp_path, text))


def test_one_key_opens_one_tenant(tmp_path, keys):
    both = f"{{keys: {{one: {{hash: '{keys[0].hash}'}}}}}}"
    sections = load_tenants(file(tmp_path, f"tenants: {{a: {both}, b: {both}}}"))
    with pytest.raises(ConfigError, match="one key, one tenant"):
        key_table(sections)


def test_the_example_loads_and_says_everything():
    chat = load_tenants(EXAMPLE)["chat"].tenant("chat")
    assert chat.quota.requests_per_minute == 600.0
    assert chat.key_quotas["batch-import"].concurrency == 2
    assert "web" not in chat.key_quotas
    assert all(getattr(chat.quota, name) is not None for name in Quota.__dataclass_fields__)


def test_an_isolated_tenants_salt_is_the_configs_and_nobody_elses(tmp_path, keys):
    """The same wherever the config is read, in any order; another for other tenants and keys."""

    def salt(text, key=keys[0]):
        return key_table(load_tenants(file(tmp_path, text))).identify(bearer(key.key)).cache_salt

    both = f"keys: {{one: {{hash: '{keys[0].hash}'}}, two: {{hash: '{keys[1].hash}'}}}}"
    turned = f"keys: {{b: {{hash: '{keys[1].hash}'}}, a: {{hash: '{keys[0].hash}'}}}}"
    one = f"keys: {{one: {{hash: '{keys[0].hash}'}}}}"
    mine = salt(f"tenants: {{chat: {{isolate_cache: true, {both}}}}}")
    assert re.fullmatch("[0-9a-f]{64}", mine)
    assert mine == salt(f"tenants: {{chat: {{isolate_cache: true, {turned}}}}}", keys[1])
    assert mine != salt(f"tenants: {{mail: {{isolate_cache: true, {both}}}}}")
    assert mine != salt(f"tenants: {{chat: {{isolate_cache: true, {one}}}}}")
    assert salt(f"tenants: {{chat: {{{both}}}}}") is None
    assert KeyTable((), {}).identify(None).cache_salt is None


def test_the_admin_key_is_its_own(keys):
    admin = AdminKey(keys[0].hash)
    assert admin.opens(bearer(keys[0].key))
    assert not admin.opens(bearer(keys[1].key))
    assert not admin.opens(None)
    assert not AdminKey(None).opens(bearer(keys[0].key))
    with pytest.raises(ConfigError):
        AdminKey(keys[0].key)
