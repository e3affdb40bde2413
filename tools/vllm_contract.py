"""Write what kvtier uses of a vLLM as JSON, from its sources: method arguments and names of attributes.

    python tools/vllm_contract.py FOLDER > tests/integrations/contracts/vllm-0.33.json

``FOLDER`` contains the folder ``vllm``, for example of an unpacked wheel. Nothing is imported, so that
versions without a build for this machine can be checked (``tests/integrations/test_contracts.py``).
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = {
    "v1/kv_cache_interface.py": (
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "KVCacheTensor",
        "MambaSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ),
    "v1/core/block_pool.py": ("BlockPool",),
    "v1/core/kv_cache_manager.py": ("KVCacheManager",),
    "v1/core/sched/output.py": ("KVConnectorBlockState", "SchedulerOutput"),
    "v1/core/sched/scheduler.py": ("Scheduler",),
    "v1/engine/core.py": ("EngineCore",),
    "v1/outputs.py": ("KVConnectorOutput",),
    "v1/request.py": ("Request",),
    "distributed/kv_events.py": ("BlockRemoved", "BlockStored"),
}

EVENT_BUILDER = "v1/core/block_pool.py", "BlockPool", "_build_block_stored_event"
"""An internal method that kvtier calls."""


def classes_of(path: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name."""
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def methods_of(node: ast.ClassDef) -> dict[str, dict[str, object]]:
    """Return the public methods of a class: the names of their arguments, and whether they are abstract."""
    return {
        item.name: {
            "arguments": [argument.arg for argument in item.args.args[1:]],
            "abstract": any(ast.unparse(mark).endswith("abstractmethod") for mark in item.decorator_list),
        }
        for item in node.body
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
    }


def arguments_of(node: ast.ClassDef, name: str) -> list[str]:
    """Return the names of the arguments of a method."""
    (method,) = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name]
    return [argument.arg for argument in method.args.args[1:]]


def attributes_of(node: ast.ClassDef) -> list[str]:
    """Return the names of fields, methods, properties, and what methods assign to ``self``."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    names |= {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    names |= {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }
    return sorted(name for name in names if not name.startswith("_"))


def main() -> None:
    """Print the contract of the vLLM in a folder."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    package = Path(sys.argv[1], "vllm")
    attributes = {
        name: attributes_of(found[name])
        for path, names in CLASSES.items()
        for found in [classes_of(package / path)]
        for name in names
    }
    methods = methods_of(classes_of(package / CONNECTOR)["KVConnectorBase_V1"])
    path, owner, name = EVENT_BUILDER
    builder = arguments_of(classes_of(package / path)[owner], name)
    contract = {"connector": methods, "attributes": attributes, "event_builder": builder}
    print(json.dumps(contract, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
