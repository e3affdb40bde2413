"""Translation of a configuration of LMCache, for ``kvtier config from-lmcache``.

What becomes of each key is in ``lmcache_keys.txt``: its names, the kind of its value, the setting that it is
or an outcome, and what to know. No value that may be a secret is in the result or in an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from kvtier.backends.redis.settings import take_credentials
from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.settings.errors import explain
from kvtier.settings.lmcache import PREFIX
from kvtier.settings.peer import join_address, split_address
from kvtier.settings.sources import suggestion
from kvtier.settings.yaml_file import MAX_BYTES, parse_file
from kvtier.units import GIB, format_size, parse_size

TABLE = Path(__file__).with_name("lmcache_keys.txt")
FILE_VARIABLE = f"{PREFIX}CONFIG_FILE"
EXTRA, ENGINE = "extra_config.", "lmcache."
"""Prefixes of keys: of those in ``extra_config``, and of any in ``kv_connector_extra_config``."""
TRANSLATED, NOT_NEEDED, NO_COUNTERPART = "translated", "not needed", "no counterpart"
UNUSED, UNKNOWN = "without effect", "unknown"
SERVER, ADAPTER = "lmcache.mp.autostart.server_args", "--l2-adapter"
DEFAULT_BYTES = 5 * GIB
TIERS = {"ram": "cpu", "disk": "disk", "pool": ""}
SECRETS = {"secret": "PEER_SECRET", "password": "POOL_PASSWORD"}
"""The environment variables that take the values; of a further pool, ``POOL_2_PASSWORD``."""
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
KINDS = {"flag": bool, "integer": int, "number": float, "text": str, "list": list, "mapping": dict}
EXAMPLES = {bool: "true", int: "256", float: "5.0", str: "text", list: "[8200]", dict: "{}"}
ADAPTERS = {"mooncake_store": "mooncakestore", "fs_native": "fs", "hf3fs": "fs"}
"""The schemes of the URLs that mean the same, where they have other names."""
BUFFER = "The first tier is not only a buffer, all KV passes through it: choose its `capacity`."
TARGETS = (
    "Set kv_transfer.targets to `peer.listen` of each decode instance (pd_peer_host and pd_peer_init_port "
    "there), or use a controller."
)
OTHERS = "Set peer.others to the addresses of the other instances, or use a controller."
CONTROLLER = "Start `kvtier controller --listen HOST:9000`, with a token if it is on another host."
UNIQUE = "Set controller.instance_id to another name on each instance: here it is {}."
VARIABLE = "Set the variable {}: its value is not part of this file."


class Key(NamedTuple):
    """One line of the table: the names of a key, or of several with the same answer."""

    names: tuple[str, ...]
    kind: str
    """Of its value: one of :data:`KINDS`, or what each value becomes, as in ``sender=prefill``."""
    outcome: str
    """A setting, with a tier by its name, as in ``pool.url``; an outcome; of a URL, the settings as JSON."""
    answer: str


def sections() -> dict[str, list[Key]]:
    """Return the table, by the titles of its sections. Reads a file."""
    found: dict[str, list[Key]] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("# "):
            keys = found.setdefault(line[2:], [])
        else:
            names, kind, outcome, answer = line.split(" | ")
            keys.append(Key(tuple(names.split()), kind, outcome, answer))
    return found


_NAMES = {name: key for keys in sections().values() for key in keys for name in key.names}


def read(file: Path | None, variables: Mapping[str, str], server: str) -> dict[str, Any]:
    """Return the keys in a file, in ``LMCACHE_*`` variables, and in options of ``lmcache server``. Blocks.

    Without a file, the variables may name one. It may have the JSON of ``--kv-transfer-config``.
    """
    values: dict[str, Any] = {}
    if named := file or variables.get(FILE_VARIABLE):
        try:
            with Path(named).open("rb") as opened:
                values = parse_file(Path(named), opened.read(MAX_BYTES + 1)).values
        except OSError as error:
            raise SettingsError(f"cannot read {named} ({error.strerror}): name LMCache's file") from None
    if values.pop("kv_connector", None):
        options = "kv_connector_extra_config"
        values |= typed(options, "mapping", values.pop(options, None) or {})
    for name, value in variables.items():
        if name.startswith(PREFIX) and name != FILE_VARIABLE:
            key = name.removeprefix(PREFIX).lower()
            values[key if find(name) is None and find(key) else name] = value.strip("\"'")
    return {**values, SERVER: server} if server else values


def read_options(options: object) -> dict[str, Any]:
    """Return the options of ``lmcache server``, in a list or a text: all adapters, of others the first."""
    values: dict[str, Any] = {}
    try:
        words = list(map(str, options)) if isinstance(options, list) else shlex.split(str(options))
    except ValueError as error:
        raise SettingsError(f"the options of `lmcache server` cannot be read: {error}") from None
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--no-"):
            values.setdefault(f"--{name.removeprefix('--no-')}", "false")
        elif name.startswith("--"):
            value = value if equals else "true" if following.startswith("--") else following
            if name == ADAPTER:
                values.setdefault(name, []).append(value)
            values.setdefault(name, value)
    return values


def find(name: str) -> Key | None:
    """Return the key with this name, or the one whose name with a ``*`` at its end matches most of it."""
    stars = [star for star in _NAMES if star.endswith("*") and name.startswith(star[:-1])]
    return _NAMES.get(name) or (_NAMES[max(stars, key=len)] if stars else None)


def typed(name: str, kind: str, value: object) -> Any:  # noqa: ANN401 - of that kind
    """Return a value in its kind. Raises :class:`SettingsError`, which does not show the value."""
    if "=" in kind:
        settings = dict(choice.split("=") for choice in kind.split())
        if (chosen := str(value).lower()) not in settings:
            raise SettingsError(f"{name} has a wrong value: use one of {', '.join(settings)}")
        return settings[chosen] or None
    try:
        if kind == "mapping" and isinstance(value, str):
            value = json.loads(value)
        elif kind == "list" and not isinstance(value, list):
            value = [part.strip() for part in str(value).split(",")]
        elif kind == "text" and isinstance(value, int | float):
            value = str(value)
        elif isinstance(value, bool) and kind != "flag":
            value = None
        return TypeAdapter(KINDS[kind]).validate_python(value)
    except ValueError:
        raise SettingsError(f"{name} has a wrong value: use for example {EXAMPLES[KINDS[kind]]}") from None


class Translation:
    """The settings, and what became of the keys. Raises :class:`SettingsError`, which names the wrong key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.settings: dict[str, Any] = {}
        self.kv_role = "kv_both"
        self.remarks: list[str] = []
        """What remains to be done."""
        self.keys: dict[str, list[str]] = {}
        """By outcome."""
        self._tree: dict[str, Any] = {name: {} for name in (*TIERS, "peer", "kv_transfer", "controller")}
        self._given: dict[str, Any] = {}
        self._used: set[str] = set()
        self._disks: list[str] = []
        self._adapters: list[object] = []
        """Those after the first."""
        for name, value in values.items():
            self._read(name, value)
        for name, value in self._given.items():
            self._set(name, value)
        self._fill_tiers()
        self._fill_pool()
        self._fill_peers()
        self._finish()

    def _read(self, name: str, value: object) -> None:
        """Take in a key, and those inside it."""
        if name not in _NAMES and name.removeprefix(ENGINE) in _NAMES:
            name = name.removeprefix(ENGINE)
        key, shown = find(name), name if name.isprintable() else repr(name)
        if value is None or name == "kv_role":
            self.kv_role = str(value) if value in ROLES.values() else self.kv_role
        elif name == EXTRA[:-1]:
            for inner, content in typed(name, "mapping", value).items():
                self._read(f"{EXTRA}{inner}", content)
        elif name == SERVER:
            for option, content in read_options(value).items():
                self._read(option, content)
        elif name == ADAPTER:
            first, *self._adapters = value if isinstance(value, list) else [value]
            self._read_adapter(typed(name, "mapping", first))
        elif key is None:
            hint = suggestion(name, [known for known in _NAMES if known.islower()])
            self._note(UNKNOWN, f"{shown}: {hint}" if hint.startswith("did you") else shown)
        elif key.outcome in (NOT_NEEDED, NO_COUNTERPART):
            self._note(key.outcome, f"{shown}: {key.answer}")
        else:
            self._given[name] = typed(name, key.kind, value)

    def _read_adapter(self, fields: dict[str, Any]) -> None:
        """Take in an L2 adapter as the URL that means the same, and what else there is for such a URL."""
        kind = str(fields.pop("type", ""))
        place = str(fields.pop("s3_endpoint", "") or fields.pop("base_path", "")).removeprefix("s3://")
        if "host" in fields:
            place = f"{fields.pop('host')}:{fields.pop('port', 6379)}"
        if fields.get("max_capacity_gb") and place:
            self._read("local_disk", place)
            self._read("max_local_disk_size", fields.pop("max_capacity_gb"))
        else:
            self._given[ADAPTER] = f"{ADAPTERS.get(kind, kind)}://{place}"
        for name, value in fields.items():
            if EXTRA + name in _NAMES:
                self._read(EXTRA + name, value)
            else:
                self._note(NOT_NEEDED, f"{ADAPTER}: {name!r}: a detail of LMCache")

    def _note(self, outcome: str, text: str) -> None:
        self.keys.setdefault(outcome, []).append(text)

    def _value(self, name: str) -> Any:  # noqa: ANN401 - of its kind
        """Return the value of a key under any of its names, or ``None``."""
        found = [alias for alias in _NAMES[name].names if alias in self._given]
        self._used.update(found)
        return self._given[found[0]] if found else None

    def _set(self, name: str, value: Any) -> None:  # noqa: ANN401 - of its kind
        """Set the setting that a key is, if it is one."""
        path = _NAMES[name].outcome
        group, _, field = path.rpartition(".")
        if path == TRANSLATED:
            return
        try:
            value = CONVERSIONS[path](value) if path in CONVERSIONS else value
        except ValueError as error:
            raise SettingsError(f"{name} has a wrong value: {error}") from None
        if value is not None:
            (self._tree[group] if group else self._tree)[field] = value

    def _fill_tiers(self) -> None:
        ram, disk = self._tree["ram"], self._tree["disk"]
        empty = ram.get("capacity") == 0
        if self._value("local_cpu") is False or empty:
            self.remarks.append(BUFFER)
        if not ram.get("capacity"):
            ram["capacity"] = _size((empty and self._value("pd_buffer_size")) or DEFAULT_BYTES)
        if not disk.get("path") or not disk.get("capacity"):
            disk.clear()
        else:
            paths = [path.strip().removeprefix("file://") for path in disk["path"].split(",")]
            disk["path"], *self._disks = filter(None, paths)

    def _fill_pool(self) -> None:
        """Set the tier that ``remote_url`` means; without one, leave it out."""
        name = "remote_url" if "remote_url" in self._given else ADAPTER
        url = self._value(name) or ""
        if url.startswith("audit://"):
            url = self._value("audit_actual_remote_url") or ""
        elif url.startswith("plugin://redis"):
            url = self._value("extra_config.redis_url") or "redis://localhost:6379"
        scheme = re.split("[^a-z0-9-]", url.removeprefix("plugin://"))[0]
        key = _NAMES.get(f"{scheme}://")
        if key is not None and key.outcome.startswith("{"):
            bare, credentials = take_credentials(url.replace(f",{scheme}://", ","))
            context = self._context(bare.partition("://")[2])
            template = json.loads(key.outcome)
            found = {field: text.format(**context) for field, text in template.items()}
            found |= {field: text or "" for field, text in credentials._asdict().items()}
            given = self._tree["pool"]
            self._tree["pool"] = {field: text for field, text in found.items() if text} | given
            return
        self._tree["pool"].clear()
        if url and key is None and name != ADAPTER:
            schemes = ", ".join(known for known in _NAMES if known.endswith("://"))
            raise SettingsError(f"{name} has none of the schemes of LMCache: use one of {schemes}")
        if url:
            self._note(NO_COUNTERPART, f"{name} with {scheme}://: {(key or _NAMES['eic://']).answer}")

    def _context(self, rest: str) -> dict[str, str]:
        """Return what the settings of a pool are made of: parts of its URL, and keys for its kind."""
        place, _, query = rest.partition("?")
        server = f"{self._value('LMCACHE_RESP_HOST')}:{self._value('LMCACHE_RESP_PORT') or 6379}"
        bucket, _, host = place.strip("/").partition(".")
        scheme = "http" if self._value("extra_config.disable_tls") else "https"
        device = re.search(r"device=([\w,-]+)", query)
        seconds = self._value("extra_config.valkey_ttl_sec") or 24 * 3600
        return {
            "address": place.strip("/") or server,
            "query": f"?{query}" if query else "",
            "bucket": bucket,
            "endpoint": f"{scheme}://{host}" if host and not host.endswith("amazonaws.com") else "",
            "device": device[1] if device else "mlx5_0",
            "service": os.environ.get("REDIS_SERVICE_NAME", "redismaster"),
            "tls": "s" if self._value("extra_config.tls_enable") else "",
            "cluster": "+cluster" if self._value("extra_config.valkey_mode") == "cluster" else "",
            "database": f"/{self._value('extra_config.valkey_database') or 0}",
            "ttl": f"{seconds:g}s" if self._value("extra_config.valkey_enable_ttl") else "",
        }

    def _fill_peers(self) -> None:
        """Set how instances reach each other; without a role, peers or a controller, leave it out."""
        tree, peer, transfer = self._tree, self._tree["peer"], self._tree["kv_transfer"]
        disaggregated, shares, controlled = map(self._value, ("enable_pd", "enable_p2p", "enable_controller"))
        role = tree.pop("role", None)
        if disaggregated:
            if role is None:
                raise SettingsError("enable_pd requires pd_role: use sender or receiver")
            self.kv_role, tree["role"] = ROLES[role], role
            if role == "decode":
                peer["listen"] = self._address("pd_peer_host", "pd_peer_init_port")
            elif self._value("pd_peer_host"):
                transfer["targets"] = [self._address("pd_peer_host", "pd_peer_init_port")]
            else:
                self.remarks.append(TARGETS)
        else:
            transfer.clear()
        if shares:
            peer.setdefault("listen", self._address("p2p_host", "p2p_init_ports"))
        elif "distributed_url" in self._given:
            peer.pop("listen", None)
        if "listen" in peer and not (controlled or disaggregated):
            self.remarks.append(OTHERS)
        if controlled:
            self.remarks.append(CONTROLLER)
            if name := tree["controller"].get("instance_id"):
                self.remarks.append(UNIQUE.format(name))
        else:
            tree["controller"].clear()
        if "listen" not in peer and not disaggregated:
            peer.clear()
            return
        nixl = transfer.get("device") == "cuda" or "enable_nixl" in self._given
        peer |= {"transport": "nixl" if nixl else peer.get("transport", "tcp"), "secret": ""}
        if peer["transport"] == "nixl" and (backends := self._value("nixl_backends")):
            peer["transport"] = {"type": "nixl", "backends": backends}

    def _address(self, host: str, ports: str) -> str:
        port = str((self._value(ports) or [8200])[0])
        if not port.isdecimal():
            raise SettingsError(f"{ports} has a wrong value: use for example 8200")
        return join_address(self._value(host) or "0.0.0.0", int(port))  # noqa: S104 - for other hosts

    def _finish(self) -> None:
        """Leave out what the type of the pool does not have, and tell what became of the keys."""
        tree, plugins = self._tree, Plugins.load()
        if kind := tree["pool"].get("type"):
            fields = plugins.backend(kind).settings_type.model_fields
            tree["pool"] = {name: value for name, value in tree["pool"].items() if name in fields}
        for group in ("pool", "peer"):
            for name in SECRETS.keys() & tree[group].keys():
                tree[group][name] = {"env": SECRETS[name]}
                self.remarks.append(VARIABLE.format(SECRETS[name]))
        for name in self._given:
            path = _NAMES[name].outcome
            group, _, field = path.rpartition(".")
            used = name in self._used if path == TRANSLATED else field in (tree[group] if group else tree)
            self._note(TRANSLATED if used else UNUSED, f"{name}: {_NAMES[name].answer}")
        tiers = [{"name": name, "type": kind, **tree.pop(name)} for name, kind in TIERS.items() if tree[name]]
        for number, path in enumerate(self._disks, 2):
            further = {**tiers[1], "name": f"disk-{number}", "path": path, "write": "on_evict"}
            tiers.insert(number, further)
        self.settings = {
            "tiers": [*tiers, *self._further_pools()],
            **{name: value for name, value in tree.items() if value != {}},
        }
        self._check(plugins)

    def _further_pools(self) -> Iterator[dict[str, Any]]:
        """Yield a tier for each adapter after the first, translated by itself."""
        for number, fields in enumerate(self._adapters, 2):
            other = Translation({ADAPTER: fields})
            for outcome, notes in other.keys.items():
                self.keys.setdefault(outcome, []).extend(notes)
            for tier in other.settings["tiers"][1:]:
                if "password" in tier:
                    variable = f"POOL_{number}_PASSWORD"
                    tier["password"] = {"env": variable}
                    self.remarks.append(VARIABLE.format(variable))
                yield {**tier, "name": f"{tier['name']}-{number}"}

    def _check(self, plugins: Plugins) -> None:
        """Validate the settings. Raises :class:`SettingsError`."""
        values = json.loads(json.dumps(self.settings))
        for group in (values.get("peer", {}), *values["tiers"]):  # The variables need not be set here.
            group.update((name, "x" * 64) for name in SECRETS.keys() & group.keys())

        def at(path: str) -> str:
            for index, tier in enumerate(self.settings["tiers"]):
                path = path.replace(f"tiers[{index}]", tier["name"])
            keys = [name for name in self._given if path.startswith(_NAMES[name].outcome)]
            keys += [] if keys or not path.startswith("pool") else ["remote_url"]
            return f"{', '.join(keys)}: {path}" if keys else path

        try:
            plugins.tier_settings(Settings(**values))
        except ValidationError as error:
            raise SettingsError(explain(error, Settings, at)) from None
        except SettingsError as error:
            lines = [line.partition(" ") for line in str(error).splitlines()]
            raise SettingsError("\n".join(f"{at(path)} {rest}" for path, _, rest in lines)) from None


def _size(count: float) -> str | int:
    """Return a size as a person writes it, if that is exact."""
    size = parse_size(int(count))
    return format_size(size) if size and parse_size(format_size(size)) == size else size


def _gib(number: float) -> str | int:
    if not isfinite(number) or number < 0:
        raise ValueError("use a size in GiB, such as 5.0")
    return _size(number * GIB)


def _without_password(url: str) -> str:
    if "@" in url:
        raise ValueError("it seems to have a password, which kvtier cannot send: use a server without one")
    return url


def _controller_url(address: str) -> str:
    host, _ = split_address(address.rpartition("://")[2])
    return f"http://{join_address(host, 9000)}"


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "ram.capacity": _gib,
    "ram.type": lambda huge: "hugepage" if huge else "cpu",
    "disk.capacity": _gib,
    "pool.deadline": lambda seconds: f"{seconds:g}s",
    "pool.metadata_server": _without_password,
    "kv_transfer.buffer": _size,
    "kv_transfer.device": lambda device: "cuda" if device.startswith("cuda") else "cpu",
    "peer.transport": lambda channel: "nixl" if channel == "nixl" else "tcp",
    "peer.listen": lambda address: address.rpartition("://")[2],
    "controller.url": _controller_url,
}
"""How the value of a key becomes that of the setting. Without one it is the same."""


def render(translation: Translation) -> str:
    """Return a settings file, with all else as comments."""
    transfer = json.dumps({"kv_connector": "KVTierConnector", "kv_role": translation.kv_role})
    lines = [
        "Translated from LMCache by `kvtier config from-lmcache`.",
        "",
        "In place of LMCacheConnectorV1, or LMCacheMPConnector and `lmcache server`:",
        f"  KVTIER_CONFIG_FILE=kvtier.yaml vllm serve MODEL --kv-transfer-config '{transfer}'",
    ]
    if translation.kv_role != "kv_both":
        lines.append("In place of the proxy script of the guides on disaggregated prefill:")
        lines.append("  kvtier proxy --prefill http://HOST:PORT --decode http://HOST:PORT")
    for title, items in {"to do": translation.remarks, **translation.keys}.items():
        if items:
            lines += ["", f"{title.capitalize()}:", *(f"- {item}" for item in items)]
    comments = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", "".join(f"# {line}".rstrip() + "\n" for line in lines))
    return f"{comments}\n{yaml.safe_dump(translation.settings, sort_keys=False, width=1000)}"
