"""KV connector for vLLM. Imported on demand by vLLM only."""

from __future__ import annotations

from kvtier.concurrency import placement

CONNECTOR = "KVTierConnector"

# vLLM imports this in the server's first process, before it starts others and binds their threads.
placement.remember()


def register() -> None:
    """Register the connector by name; vLLM calls this plugin in each process (``vllm.general_plugins``).

    Users then only need ``--kv-transfer-config '{"kv_connector":"KVTierConnector","kv_role":"kv_both"}'``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
