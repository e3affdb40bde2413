"""The files, commands and requests of LMCache's guides."""

from __future__ import annotations

from typing import NamedTuple

CPU_OFFLOAD = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
"""
CPU_OFFLOAD_SERVE = """
LMCACHE_CONFIG_FILE="cpu-offload.yaml" \\
vllm serve \\
meta-llama/Llama-3.1-8B-Instruct \\
--max-model-len 16384 \\
--kv-transfer-config \\
'{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}'
"""
CPU_OFFLOAD_VARIABLES = {
    "LMCACHE_CHUNK_SIZE": "256",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "5.0",
}


class Disaggregated(NamedTuple):
    """What a guide on disaggregated prefill has."""

    prefiller: str
    decoder: str
    serve_decoder: str
    serve_prefiller: str
    proxy: str
    request_port: str
    """Where its request goes."""
    target: str | None
    """What the comment on ``kv_transfer.targets`` asks for, if it does."""


FIRST_PREFILLER = """
local_cpu: False
max_local_cpu_size: 0
max_local_disk_size: 0
remote_serde: NULL

enable_nixl: True
nixl_role: "sender"
nixl_peer_host: "localhost"
nixl_peer_port: 55555
nixl_buffer_size: 1073741824  # 1GB buffer for KV cache transfer
nixl_buffer_device: "cuda"
nixl_enable_gc: True
"""
FIRST = Disaggregated(
    prefiller=FIRST_PREFILLER,
    decoder=FIRST_PREFILLER.replace("sender", "receiver"),
    serve_decoder="""
UCX_TLS=cuda_ipc,cuda_copy,tcp \\
    LMCACHE_CONFIG_FILE=lmcache-decoder-config.yaml \\
    LMCACHE_USE_EXPERIMENTAL=True \\
    CUDA_VISIBLE_DEVICES=1 \\
    vllm serve meta-llama/Llama-3.1-8B-Instruct \\
    --port 8200 \\
    --disable-log-requests \\
    --kv-transfer-config \\
    '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer","kv_connector_extra_config": {"discard_partial_chunks": false, "lmcache_rpc_port": "consumer1"}}'
""",  # noqa: E501
    serve_prefiller="""
UCX_TLS=cuda_ipc,cuda_copy,tcp \\
    LMCACHE_CONFIG_FILE=lmcache-prefiller-config.yaml \\
    LMCACHE_USE_EXPERIMENTAL=True \\
    CUDA_VISIBLE_DEVICES=0 \\
    vllm serve meta-llama/Llama-3.1-8B-Instruct \\
    --port 8100 \\
    --disable-log-requests \\
    --kv-transfer-config \\
    '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer","kv_connector_extra_config": {"discard_partial_chunks": false, "lmcache_rpc_port": "producer1"}}'
""",  # noqa: E501
    proxy="""
python3 disagg_proxy_server.py \\
    --host localhost \\
    --port 9000 \\
    --prefiller-host localhost \\
    --prefiller-port 8100 \\
    --decoder-host localhost \\
    --decoder-port 8200
""",
    request_port="9000",
    target=None,
)
SECOND = Disaggregated(
    prefiller="""
local_cpu: False
enable_pd: True
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "localhost"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
""",
    decoder="""
local_cpu: False
enable_pd: True
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "localhost"
pd_peer_init_port: 7300
pd_peer_alloc_port: 7400
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
""",
    serve_decoder=FIRST.serve_decoder.replace("8200", "7200"),
    serve_prefiller=FIRST.serve_prefiller.replace("8100", "7100"),
    proxy="""
python3 ../disagg_proxy_server.py \\
  --host localhost \\
  --port 9100 \\
  --prefiller-host localhost \\
  --prefiller-port 7100 \\
  --num-prefillers 1 \\
  --decoder-host localhost \\
  --decoder-port 7200 \\
  --decoder-init-port 7300 \\
  --decoder-alloc-port 7400 \\
  --proxy-host localhost \\
  --proxy-port 7500 \\
  --num-decoders 1
""",
    request_port="9100",
    target="localhost:7300",
)
STORY = """
curl http://localhost:9000/v1/completions \\
    -H "Content-Type: application/json" \\
    -d '{
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "prompt": "Tell me a story",
        "max_tokens": 100
    }'
"""

INFINISTORE = """
chunk_size: 256
remote_url: "infinistore://127.0.0.1:12345/?device=mlx5_1"
remote_serde: "naive"
local_cpu: False
max_local_cpu_size: 5
"""
INFINISTORE_SERVE = """
LMCACHE_CONFIG_FILE="infinistore-config.yaml" \\
vllm serve \\
Qwen/Qwen2.5-7B-Instruct \\
--seed 42 \\
--max-model-len 16384 \\
--gpu-memory-utilization 0.8 \\
--kv-transfer-config \\
'{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}'
"""
FUTURE = """
curl -X POST "http://localhost:8000/v1/completions" \\
-H "Content-Type: application/json" \\
-d '{
"model": "Qwen/Qwen2.5-7B-Instruct",
"prompt": "The future of AI is",
"max_tokens": 100,
"temperature": 0.7
}'
"""

INSTANCE_1 = """
chunk_size: 256
local_cpu: True
max_local_cpu_size: 5

# cache controller configurations
enable_controller: True
lmcache_instance_id: "lmcache_instance_1"
controller_pull_url: "localhost:8300"
controller_reply_url: "localhost:8400"
lmcache_worker_ports: 8500

# P2P configurations
enable_p2p: True
p2p_host: "localhost"
p2p_init_ports: 8200
p2p_lookup_ports: 8201
transfer_channel: "nixl"
"""
INSTANCE_2 = INSTANCE_1.replace("8500", "8501").replace("8200", "8202").replace("8201", "8203")
"""With the same id as the first, as in the guide."""
MOVE_SERVE_1 = """
PYTHONHASHSEED=123 UCX_TLS=rc CUDA_VISIBLE_DEVICES=0 LMCACHE_CONFIG_FILE=instance1.yaml vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 4096 \\
  --gpu-memory-utilization 0.8 --port 8000 --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}'
"""  # noqa: E501
MOVE_SERVE_2 = (
    MOVE_SERVE_1.replace("DEVICES=0", "DEVICES=1").replace("instance1", "instance2").replace("8000", "8001")
)
EXPLAIN = """
curl -X POST http://localhost:8000/v1/completions \\
  -H "Content-Type: application/json" \\
  -d '{
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "prompt": "Explain the significance of KV cache in language models.",
        "max_tokens": 10
      }'
"""
TOKENIZE = """
curl -X POST http://localhost:8000/tokenize \\
  -H "Content-Type: application/json" \\
  -d '{
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "prompt": "Explain the significance of KV cache in language models."
      }'
"""
MOVE = """
curl -X POST http://localhost:9000/move \\
  -H "Content-Type: application/json" \\
  -d '{
        "old_position": ["lmcache_instance_1", "LocalCPUBackend"],
        "new_position": ["lmcache_instance_2", "LocalCPUBackend"],
        "tokens": [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
      }'
"""
