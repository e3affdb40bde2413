"""``kvtier config from-lmcache``: what each key of LMCache becomes, with the configurations of its guides."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import lmcache
from kvtier.errors import SettingsError
from kvtier.plugins import load_all
from kvtier.settings.lmcache import COMMAND
from tests.rigs.lmcache_guides import CPU_OFFLOAD, FIRST, INFINISTORE, INSTANCE_1, INSTANCE_2, SECOND
from tools import lmcache_reference

from .conftest import Kvtier, Result

SECRET = "a password of nobody"
GUIDES = Path(__file__).parents[2] / "docs"

CONNECTOR = """{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer","kv_connector_extra_config":
{"discard_partial_chunks": false, "lmcache_rpc_port": "consumer1"}}"""

KEYS = """
app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratio
blend_recompute_ratios blend_special_str blend_thresholds blocking_timeout_secs cache_policy chunk_size
chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_auto_exit_timeout_hours
chunk_statistics_auto_start_statistics chunk_statistics_strategy controller_pull_url controller_reply_url
controller_url cufile_buffer_size distributed_url enable_async_loading enable_blending
enable_chunk_statistics enable_controller enable_hidden_state_cache enable_kv_events
enable_lazy_memory_allocator enable_nixl enable_p2p enable_pd enable_scheduler_bypass_lookup enable_xpyd
error_handling external_backends external_lookup_client extra_config gds_backend gds_buffer_size gds_path
gds_path_sharding hidden_state_layers hidden_states_retrieve_mode hit_miss_ratio internal_api_server_enabled
internal_api_server_host internal_api_server_include_index_list internal_api_server_port_start
internal_api_server_socket_path_prefix lazy_memory_expand_trigger_ratio lazy_memory_initial_ratio
lazy_memory_safe_size lazy_memory_step_ratio lmcache_instance_id lmcache_worker_heartbeat_delay_time
lmcache_worker_heartbeat_time lmcache_worker_ids lmcache_worker_port lmcache_worker_ports local_cpu
local_cpu_use_hugepages local_disk local_disk_path_sharding lookup_server_worker_ids lookup_timeout_ms
lookup_url maru_path maru_pool_size max_hidden_state_cpu_size max_local_cpu_size max_local_disk_size
min_retrieve_tokens mla_lookup_server_worker_id mp_host mp_port nixl_backends nixl_buffer_device
nixl_buffer_size nixl_enable_gc nixl_peer_alloc_port nixl_peer_host nixl_peer_init_port nixl_peer_port
nixl_proxy_host nixl_proxy_port nixl_receiver_host nixl_receiver_port nixl_role numa_mode p2p_host
p2p_init_ports p2p_lookup_ports pd_allocation_timeout_sec pd_backend_mode pd_bidirectional pd_buffer_device
pd_buffer_size pd_condition_poll_interval_sec pd_max_prefill_len pd_peer_alloc_port pd_peer_host
pd_peer_init_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_role pd_shutdown_timeout_sec
pd_skip_proxy_notification pin_check_interval_sec pin_timeout_sec plugin_locations
pre_caching_hash_algorithm priority_limit py_enable_gc remote_config_url remote_serde remote_storage_plugins
remote_url reserve_local_cpu_size retrieve_locations run_script_api_enabled runtime_plugin_locations
save_decode_cache save_unfull_chunk script_allowed_imports storage_plugins store_location transfer_channel
use_gds use_gpu_connector_v3 use_layerwise weka_path
"""
"""All keys that a configuration file of LMCache 0.3.0 to 0.5.6 may have."""

RAM = {"name": "ram", "type": "cpu", "capacity": "5GiB"}
PEER = {"secret": {"env": "PEER_SECRET"}, "transport": "nixl"}
TRANSFER = {"device": "cuda", "buffer": "1GiB"}
CONTROLLER = {"url": "http://localhost:9000", "instance_id": "lmcache_instance_1"}
POOL_1 = {
    "name": "pool",
    "type": "infinistore",
    "url": "infinistore://127.0.0.1:12345",
    "connection": "rdma",
    "device": "mlx5_1",
    "link_type": "Ethernet",
}
SMALL = {**RAM, "capacity": "1GiB"}
GUIDES_AND_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "host memory": (CPU_OFFLOAD, {"chunk_tokens": 256, "tiers": [RAM]}),
    "huge pages": ("local_cpu_use_hugepages: true", {"tiers": [{**RAM, "type": "hugepage"}]}),
    "prefill, first generation": (
        FIRST.prefiller,
        {
            "role": "prefill",
            "tiers": [SMALL],
            "peer": PEER,
            "kv_transfer": {**TRANSFER, "targets": ["localhost:55555"]},
        },
    ),
    "decode, first generation": (
        FIRST.decoder,
        {
            "role": "decode",
            "tiers": [SMALL],
            "peer": {**PEER, "listen": "localhost:55555"},
            "kv_transfer": TRANSFER,
        },
    ),
    "prefill": (SECOND.prefiller, {"role": "prefill", "tiers": [RAM], "peer": PEER, "kv_transfer": TRANSFER}),
    "decode": (
        SECOND.decoder,
        {
            "role": "decode",
            "tiers": [RAM],
            "peer": {**PEER, "listen": "localhost:7300"},
            "kv_transfer": TRANSFER,
        },
    ),
    "InfiniStore": (INFINISTORE, {"chunk_tokens": 256, "tiers": [RAM, POOL_1]}),
    "peers and controller, 1": (
        INSTANCE_1,
        {
            "chunk_tokens": 256,
            "tiers": [RAM],
            "peer": {**PEER, "listen": "localhost:8200"},
            "controller": CONTROLLER,
        },
    ),
    "peers and controller, 2": (
        INSTANCE_2,
        {
            "chunk_tokens": 256,
            "tiers": [RAM],
            "peer": {**PEER, "listen": "localhost:8202"},
            "controller": CONTROLLER,
        },
    ),
    "flag of the connector": (CONNECTOR, {"tiers": [RAM]}),
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("PEER_SECRET", "POOL_PASSWORD"):
        monkeypatch.setenv(variable, "x" * 64)
    return tmp_path / "lmcache.yaml"


def translated(result: Result, folder: Path) -> dict[str, Any]:
    """Check that what a command has printed is a valid settings file, and return its content."""
    assert result.status == 0, result.errors
    path = folder / "kvtier.yaml"
    path.write_text(result.output)
    assert load_all(path).problems == []
    settings: dict[str, Any] = yaml.safe_load(result.output)
    return settings


def translate(text: str, kvtier: Kvtier, file: Path) -> dict[str, Any]:
    file.write_text(text)
    return translated(kvtier("config", "from-lmcache", file), file.parent)


# The guides of LMCache


@pytest.mark.parametrize("guide", GUIDES_AND_SETTINGS)
def test_configurations_of_the_guides(kvtier: Kvtier, file: Path, guide: str) -> None:
    text, settings = GUIDES_AND_SETTINGS[guide]
    assert translate(text, kvtier, file) == settings
    output = kvtier("config", "from-lmcache", file)
    assert output.errors == "", "all keys are known, and have a counterpart or need none"
    for name in re.findall(r"^(\w+):", text, re.MULTILINE):
        if yaml.safe_load(text)[name] is not None:
            assert f"# - {name}: " in output.output


def test_variables_of_the_guide(kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "True")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "7.5")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU_USE_HUGEPAGES", "true")
    monkeypatch.setenv("LMCACHE_USE_EXPERIMENTAL", "True")
    ram = {"name": "ram", "type": "hugepage", "capacity": "7.5GiB"}
    settings = translated(kvtier(*COMMAND.split()[1:]), file.parent)
    assert settings == {"chunk_tokens": 256, "tiers": [ram]}
    file.write_text(INFINISTORE)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    settings = translated(kvtier("config", "from-lmcache", "--env"), file.parent)
    assert settings == {"chunk_tokens": 256, "tiers": [ram, POOL_1]}, "variables replace what is in the file"


@pytest.mark.parametrize(
    ("text", "role"),
    [
        (CPU_OFFLOAD, "kv_both"),
        (FIRST.prefiller, "kv_producer"),
        (SECOND.decoder, "kv_consumer"),
        (CONNECTOR, "kv_consumer"),
        ('{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}', "kv_both"),
    ],
)
def test_flag_for_vllm(kvtier: Kvtier, file: Path, text: str, role: str) -> None:
    file.write_text(text)
    output = kvtier("config", "from-lmcache", file).output
    flag = re.search(r"--kv-transfer-config '(.*)'", output)
    assert flag
    assert json.loads(flag[1]) == {"kv_connector": "KVTierConnector", "kv_role": role}
    assert ("kvtier proxy" in output) == (role != "kv_both")


# Other keys


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        ("remote_url: redis://cache:6379", {"type": "redis", "url": "redis://cache:6379"}),
        ("remote_url: rediss://cache:6380/1", {"type": "redis", "url": "rediss://cache:6380/1"}),
        ("remote_url: unix:///run/redis.sock", {"type": "redis", "url": "unix:///run/redis.sock"}),
        (
            "remote_url: redis-sentinel://a:26379,redis-sentinel://b:26379",
            {"type": "redis", "url": "redis+sentinel://a:26379,b:26379/redismaster"},
        ),
        (
            "remote_url: redis-cluster://a:7000,b:7000",
            {"type": "redis", "url": "redis+cluster://a:7000,b:7000"},
        ),
        (
            "remote_url: valkey://cache:6379\nblocking_timeout_secs: 7\nextra_config: {tls_enable: true, "
            "valkey_mode: cluster, valkey_enable_ttl: true, valkey_ttl_sec: 60}",
            {"type": "valkey", "url": "valkeys+cluster://cache:6379/0", "ttl": "60s", "deadline": "7s"},
        ),
        (
            "remote_url: mooncakestore://pool:50051/\nextra_config: {local_hostname: here, protocol: rdma, "
            "device_name: mlx5_0, global_segment_size: 1073741824, metadata_server: 'http://pool/metadata'}",
            {
                "type": "mooncake",
                "master": "pool:50051",
                "local_hostname": "here",
                "protocol": "rdma",
                "device": "mlx5_0",
                "segment_size": 1 << 30,
                "metadata_server": "http://pool/metadata",
            },
        ),
        (
            "remote_url: s3://bucket.s3.internal:9000\nextra_config: {s3_region: eu, disable_tls: true}",
            {
                "type": "s3",
                "url": "s3://bucket",
                "region": "eu",
                "endpoint": "http://s3.internal:9000",
            },
        ),
        ("remote_url: s3://b.s3.amazonaws.com", {"type": "s3", "url": "s3://b"}),
        ("remote_url: azure://container", {"type": "s3", "url": "az://container"}),
        (
            "remote_url: audit://host:1\nextra_config: {audit_actual_remote_url: 'redis://cache:6379'}",
            {"type": "redis", "url": "redis://cache:6379"},
        ),
        (
            "remote_url: plugin://redis\nextra_config: {redis_url: 'redis://cache:6379'}",
            {"type": "redis", "url": "redis://cache:6379"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_remote_urls(kvtier: Kvtier, file: Path, text: str, pool: dict[str, Any]) -> None:
    extra = {"deadline": "10s"} if pool["type"] == "s3" else {}
    assert translate(text, kvtier, file)["tiers"][1:] == [{"name": "pool", **pool, **extra}]


@pytest.mark.parametrize(
    "scheme", ["lm", "external", "eic", "bigtable", "sagemaker-hyperpod", "mock", "blackhole"]
)
def test_urls_without_counterpart(kvtier: Kvtier, file: Path, scheme: str) -> None:
    file.write_text(f"remote_url: {scheme}://host:1/x")
    result = kvtier("config", "from-lmcache", file)
    assert translated(result, file.parent) == {"tiers": [RAM]}
    assert result.message == f"no counterpart: remote_url with {scheme}://"
    assert f"# - remote_url with {scheme}://: " in result.output


def test_all_tiers(kvtier: Kvtier, file: Path) -> None:
    text = """
        max_local_cpu_size: 20
        local_disk: "file:///var/cache/lmcache/"
        max_local_disk_size: 100.5
        extra_config: {use_odirect: true, disk_io_threads: 8}
        remote_url: redis://cache:6379
        cache_policy: LFU
        save_decode_cache: true
        save_unfull_chunk: false
    """
    assert translate(text, kvtier, file) == {
        "tiers": [
            {**RAM, "capacity": "20GiB", "eviction": "lfu"},
            {
                "name": "disk",
                "type": "disk",
                "path": "/var/cache/lmcache/",
                "capacity": "100.5GiB",
                "direct": True,
                "concurrency": 8,
            },
            {"name": "pool", "type": "redis", "url": "redis://cache:6379"},
        ],
        "save_decode": True,
        "partial_chunks": False,
    }


def test_mp_mode(kvtier: Kvtier, file: Path) -> None:
    adapter = json.dumps(
        {"type": "resp", "host": "cache", "port": 6379, "password": SECRET, "num_workers": 4}
    )
    options = (
        f"lmcache server --l1-size-gb 20 --no-l1-use-lazy --eviction-policy=LRU --l2-adapter '{adapter}'"
    )
    result = kvtier("config", "from-lmcache", "--server", options)
    pool = {
        "name": "pool",
        "type": "redis",
        "url": "redis://cache:6379",
        "password": {"env": "POOL_PASSWORD"},
    }
    expected = {"tiers": [{**RAM, "capacity": "20GiB", "eviction": "lru"}, pool]}
    assert translated(result, file.parent) == expected
    assert SECRET not in result.output
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": 5555,
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": ["--l1-size-gb", "20", "--chunk-size", 128],
            "lmcache.max_local_cpu_size": 3,
        },
    }
    assert translate(json.dumps(connector), kvtier, file)["chunk_tokens"] == 128


@pytest.mark.parametrize(
    ("kind", "fields", "pool"),
    [
        (
            "s3",
            {"s3_endpoint": "s3://b.s3.amazonaws.com", "s3_region": "eu"},
            {"type": "s3", "url": "s3://b", "region": "eu", "deadline": "10s"},
        ),
        ("valkey", {"host": "a", "port": 1}, {"type": "valkey", "url": "valkey://a:1/0"}),
        (
            "mooncake_store",
            {"master_server_address": "a:1", "protocol": "tcp"},
            {"type": "mooncake", "master": "a:1", "protocol": "tcp"},
        ),
        ("dax", {"device_path": "/dev/dax0"}, None),
    ],
)
def test_l2_adapters(kvtier: Kvtier, file: Path, kind: str, fields: Any, pool: Any) -> None:
    options = f"--l2-adapter '{json.dumps({'type': kind, **fields})}'"
    result = kvtier("config", "from-lmcache", "--server", options)
    tiers = [RAM, {"name": "pool", **pool}] if pool else [RAM]
    assert translated(result, file.parent)["tiers"] == tiers
    assert ("no counterpart: --l2-adapter with dax://" in result.errors) == (pool is None)


def test_all_adapters_are_tiers(kvtier: Kvtier, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_2_PASSWORD", "x")
    adapters = [
        {"type": "resp", "host": "a", "password": SECRET},
        {"type": "valkey", "host": "b", "port": 2, "password": SECRET},
        {"type": "dax", "device_path": "/dev/dax0"},
        {"type": "fs_native", "base_path": "/d", "use_odirect": True, "max_capacity_gb": 3, "num_workers": 2},
        {"type": "s3", "s3_endpoint": "s3://c.s3.amazonaws.com"},
    ]
    options = [word for adapter in adapters for word in ("--l2-adapter", json.dumps(adapter))]
    result = kvtier("config", "from-lmcache", "--server", shlex.join(options))
    first = {"type": "redis", "url": "redis://a:6379", "password": {"env": "POOL_PASSWORD"}}
    second = {"type": "valkey", "url": "valkey://b:2/0", "password": {"env": "POOL_2_PASSWORD"}}
    fourth = {"type": "disk", "path": "/d", "capacity": "3GiB", "direct": True}
    fifth = {"type": "s3", "url": "s3://c", "deadline": "10s"}
    assert translated(result, file.parent)["tiers"] == [
        RAM,
        {"name": "pool", **first},
        {"name": "pool-2", **second},
        {"name": "disk-4", **fourth},
        {"name": "pool-5", **fifth},
    ]
    assert "no counterpart: --l2-adapter with dax://" in result.errors
    assert "# - Set the variable POOL_2_PASSWORD" in result.output
    assert SECRET not in result.output + result.errors
    in_connector = {"lmcache.mp.autostart.server_args": options}
    text = json.dumps({"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": in_connector})
    assert len(translate(text, kvtier, file)["tiers"]) == 5


def test_all_paths_are_tiers(kvtier: Kvtier, file: Path) -> None:
    text = "local_disk: 'file:///a/, /b,/c'\nmax_local_disk_size: 2\nremote_url: redis://cache:6379"
    disk = {"type": "disk", "capacity": "2GiB"}
    assert translate(f"{text}\nextra_config: {{use_odirect: true}}", kvtier, file)["tiers"] == [
        RAM,
        {"name": "disk", **disk, "path": "/a/", "direct": True},
        {"name": "disk-2", **disk, "path": "/b", "direct": True, "write": "on_evict"},
        {"name": "disk-3", **disk, "path": "/c", "direct": True, "write": "on_evict"},
        {"name": "pool", "type": "redis", "url": "redis://cache:6379"},
    ]


def test_an_id_that_instances_share_is_named(kvtier: Kvtier, file: Path) -> None:
    """In the guide on moving KV, both have the same, which only one can have."""
    file.write_text(INSTANCE_2)
    advice = "# - Set controller.instance_id to another name on each instance: here it is lmcache_instance_1."
    assert advice in kvtier("config", "from-lmcache", file).output
    file.write_text(INSTANCE_2.replace('lmcache_instance_id: "lmcache_instance_1"', ""))
    assert "controller.instance_id" not in kvtier("config", "from-lmcache", file).output


def test_keys_that_others_switch_off_are_named(kvtier: Kvtier, file: Path) -> None:
    text = "cache_policy: MRU\np2p_host: a\nnixl_role: sender\nlmcache_instance_id: b\n"
    text += "local_disk: /x\ntransfer_channel: nixl\ndistributed_url: a:1"
    assert translate(text, kvtier, file) == {"tiers": [RAM]}
    without_effect = kvtier("config", "from-lmcache", file).output.partition("# Without effect:\n")[2]
    assert re.findall(r"# - (\w+):", without_effect) == re.findall(r"(?m)^(\w+):", text)


def test_keys_without_counterpart_and_unknown_keys_are_named(kvtier: Kvtier, file: Path) -> None:
    file.write_text('enable_blending: true\nchunk_sise: 1\n"a\\nb": 1\nextra_config: {something: 1}\n')
    result = kvtier("config", "from-lmcache", file)
    assert translated(result, file.parent) == {"tiers": [RAM]}
    assert "# - chunk_sise: did you mean chunk_size?" in result.output
    assert result.errors.splitlines() == [
        r"unknown: chunk_sise, 'a\nb', extra_config.something",
        "no counterpart: enable_blending",
    ]


def test_unknown_variable(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_SOMETHING", SECRET)
    result = kvtier("config", "from-lmcache", "--env")
    assert result.errors == "unknown: LMCACHE_SOMETHING\n"
    assert SECRET not in result.output


# Errors and secrets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_size: true", "chunk_size has a wrong value: use for example 256"),
        ("chunk_size: 0", "chunk_size: chunk_tokens is invalid: 0: use a whole number"),
        ("local_cpu: maybe", "local_cpu has a wrong value: use for example true"),
        ("max_local_cpu_size: -1", "max_local_cpu_size has a wrong value: use a size in GiB"),
        ("max_local_cpu_size: .inf", "max_local_cpu_size has a wrong value: use a size in GiB"),
        ("max_local_cpu_size: 0.0000001", "max_local_cpu_size: ram.capacity is invalid: 107 bytes is less"),
        ("cache_policy: best", "cache_policy has a wrong value: use one of lru,"),
        ("enable_pd: true", "enable_pd requires pd_role: use sender or receiver"),
        ("enable_pd: true\npd_role: both", "pd_role has a wrong value: use one of sender, receiver"),
        ("enable_p2p: true\np2p_init_ports: [x]", "p2p_init_ports has a wrong value: use for example 8200"),
        ("extra_config: 3", "extra_config has a wrong value: use for example {}"),
        ("remote_url: what://host", "remote_url has none of the schemes of LMCache: use one of redis://"),
        (
            "enable_controller: true\ncontroller_pull_url: x",
            "controller_pull_url has a wrong value: 'x' is not",
        ),
        (
            "enable_controller: true\ncontroller_pull_url: x:1\nlmcache_instance_id: a b",
            "lmcache_instance_id: controller.instance_id is 'a b'",
        ),
        ("- 1", "is not a mapping"),
        (
            f"remote_url: redis://kvtier:{SECRET}@cache:port",
            "remote_url: pool.url is invalid: an address in it",
        ),
        (f"remote_url: what://kvtier:{SECRET}@cache", "remote_url has none of the schemes"),
        (f"remote_url: [{SECRET}]", "remote_url has a wrong value: use for example text"),
        (
            f"remote_url: 'mooncakestore://a:1'\nextra_config: {{metadata_server: 'redis://:{SECRET}@b'}}",
            "extra_config.metadata_server has a wrong value: it seems to have a password",
        ),
        (f"remote_url: redis://{SECRET}@cache:6379", "requires `password`"),
    ],
)
def test_wrong_values(kvtier: Kvtier, file: Path, text: str, message: str) -> None:
    file.write_text(text)
    result = kvtier("config", "from-lmcache", file)
    assert (result.status, result.output) == (1, "")
    assert result.message.startswith("error: ")
    assert message in result.message
    assert SECRET not in result.errors


def test_missing_file_and_no_source(kvtier: Kvtier, tmp_path: Path) -> None:
    assert "cannot read" in kvtier("config", "from-lmcache", tmp_path / "none").message
    assert "No closing quotation" in kvtier("config", "from-lmcache", "--server", "'").message
    assert kvtier("config", "from-lmcache").message == "error: name LMCache's file, or add --env or --server"


@pytest.mark.parametrize(
    "text",
    [
        f"remote_url: 'redis://kvtier:{SECRET}@cache:6379/1'",
        f"remote_url: 'redis-cluster://kvtier:{SECRET}@a:7000,b:7000'",
        f"remote_url: 'valkey://a:1'\nextra_config: {{valkey_username: kvtier, valkey_password: {SECRET}}}",
        f"remote_url: 'resp://cache:6379'\nextra_config: {{username: kvtier, password: {SECRET}}}",
        f"remote_url: 's3://b.s3.amazonaws.com'\nextra_config: {{aws_secret_access_key: {SECRET}}}",
        f"{SECRET.replace(' ', '_')}_is_a_value: {SECRET}\nenable_blending: {SECRET}",
    ],
)
def test_secrets_are_not_printed(kvtier: Kvtier, file: Path, text: str) -> None:
    file.write_text(text)
    result = kvtier("config", "from-lmcache", file)
    pool = translated(result, file.parent)["tiers"][-1]
    assert SECRET not in result.output + result.errors
    if "kvtier" in text:
        assert (pool["user"], pool["password"]) == ("kvtier", {"env": "POOL_PASSWORD"})
        assert "Set the variable POOL_PASSWORD" in result.output


# The table


def test_every_key_of_lmcache_is_known() -> None:
    assert [key for key in KEYS.split() if lmcache.find(key) is None] == []
    translation = lmcache.Translation(dict.fromkeys(KEYS.split()))
    assert "unknown" not in translation.keys


def test_table() -> None:
    names = [name for keys in lmcache.sections().values() for key in keys for name in key.names]
    assert len(names) == len(set(names))
    for keys in lmcache.sections().values():
        for key in keys:
            assert "=" in key.kind or key.kind in (*lmcache.KINDS, "URL", "-")
            assert key.answer
            assert "|" not in key.answer


@pytest.mark.parametrize("key", ["pd_role", "chunk_size", "remote_url", "local_disk", "enable_p2p"])
def test_a_wrong_value_of_each_kind_is_an_error(key: str) -> None:
    with pytest.raises(SettingsError, match=f"^{key} "):
        lmcache.Translation({key: {"a": object()}})


def test_page_is_up_to_date() -> None:
    page = lmcache_reference.page()
    assert lmcache_reference.PAGE.read_text() == page, "run: python tools/lmcache_reference.py"
