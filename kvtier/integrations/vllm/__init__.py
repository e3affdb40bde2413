"""The connector for vLLM. Nothing here is imported before vLLM asks for it."""

from __future__ import annotations

CONNECTOR = "KVTierConnector"


def register() -> None:
    """The plugin that vLLM calls in each of its processes (entry-point group ``vllm.general_plugins``).

    It makes the connector known by name, so that
    ``--kv-transfer-config '{"kv_connector":"KVTierConnector","kv_role":"kv_both"}'`` is all it takes.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
