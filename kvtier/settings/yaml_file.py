"""Read a settings file: YAML within limits, and the line of each setting.

The limits hold before any value is built, so that a file of any content is refused within a second. Messages
never contain a value, which may be a secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from kvtier.errors import SettingsError

MAX_BYTES = 1 << 18
MAX_DEPTH = 32
MAX_VALUES = 10_000
"""Limit of keys and values, those that aliases repeat included."""
MAX_KEY_CHARACTERS = 128
MAX_NUMBER_CHARACTERS = 100

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}
_NUMBERS = {_TAG + "int", _TAG + "float"}
# Dates are text: no setting is one.
_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class SettingsFile(NamedTuple):
    """The content of a settings file."""

    values: dict[str, Any]
    lines: dict[str, int]
    """Line of each dotted key, such as ``tiers[1].path``."""


def parse_file(path: Path, data: bytes) -> SettingsFile:
    """Return the content of the settings file ``path``. Raises :class:`SettingsError` with the line."""
    if len(data) > MAX_BYTES:
        raise SettingsError(
            f"the settings file {path} has more than {MAX_BYTES >> 10} KiB: set the path of a settings file"
        )
    loader = _loader(path, data)
    try:
        values = loader.read()
    except _Refused as error:
        raise SettingsError(f"the settings file {path}, {_position(error.problem_mark)}: {error}") from None
    except yaml.MarkedYAMLError as error:
        place = _position(error.problem_mark or loader.get_mark())
        raise _not_yaml(path, f"{place}: {error.problem}") from error
    except (ValueError, OverflowError) as error:  # Of a character or version number out of range.
        raise _not_yaml(path, f"{_position(loader.get_mark())}: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(
            f"the settings file {path} is not a mapping of settings: use lines such as chunk_tokens: 256"
        )
    if isinstance(values.get("kvtier"), dict):
        raise SettingsError(
            f"the settings file {path}, line {loader.lines['kvtier']}: the settings are inside kvtier: "
            "remove this line, and the indentation of the settings below it"
        )
    return SettingsFile(values, loader.lines)


class _Refused(yaml.MarkedYAMLError):
    """YAML that settings do not use."""

    problem_mark: yaml.Mark

    def __str__(self) -> str:
        return str(self.problem)


def _refuse(mark: yaml.Mark, problem: str) -> NoReturn:
    raise _Refused(None, None, problem, mark)


class _Loader(yaml.SafeLoader):
    """Composes nodes within the limits, and builds plain values of them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = _RESOLVERS
        self.lines: dict[str, int] = {}
        self._depth = 0
        self._values = 0

    def read(self) -> object:
        """Return the only document. Raises ``yaml.YAMLError``."""
        node = self.get_single_node()
        self._values = 0
        return {} if node is None else self._build(node, "")

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and all within it. Raises ``yaml.YAMLError``."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._enter(event.start_mark)
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and event.anchor not in self.anchors:
            _refuse(event.start_mark, "an alias without its anchor: put text that begins with * in quotes")
        if not is_alias and event.anchor in self.anchors:
            _refuse(event.start_mark, "an anchor that exists already: put text that begins with & in quotes")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _build(self, node: yaml.Node, key: str) -> object:
        """Return the value of ``node``, that of the dotted ``key``."""
        self._enter(node.start_mark)
        value: object
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            value = self._mapping(node, key)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            value = [self._item(item, f"{key}[{index}]") for index, item in enumerate(node.value)]
        else:
            value = self._scalar(node)
        self._depth -= 1
        return value

    def _enter(self, mark: yaml.Mark) -> None:
        self._depth += 1
        self._values += 1
        if self._depth > MAX_DEPTH:
            _refuse(mark, f"more than {MAX_DEPTH} mappings and lists inside each other: remove some")
        if self._values > MAX_VALUES:
            _refuse(mark, f"more than {MAX_VALUES} keys and values, those of aliases included: remove some")

    def _item(self, node: yaml.Node, key: str) -> object:
        self.lines[key] = node.start_mark.line + 1
        return self._build(node, key)

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        content: dict[str, Any] = {}
        seen = set()
        # Merged keys first, so that the mapping's own replace them.
        for name_node, value_node in sorted(node.value, key=lambda pair: not _is_merge(pair[0])):
            if _is_merge(name_node):
                content.update(self._merged(value_node, key))
                continue
            name = self._name(name_node)
            if name in seen:
                _refuse(name_node.start_mark, f"duplicate key {name!r}: remove one")
            seen.add(name)
            dotted = f"{key}.{name}" if key else name
            self.lines[dotted] = name_node.start_mark.line + 1
            content[name] = self._build(value_node, dotted)
        return content

    def _merged(self, node: yaml.Node, key: str) -> dict[str, Any]:
        """Return the content of one mapping, or of several, of which the first has precedence."""
        content: dict[str, Any] = {}
        for source in reversed(node.value if isinstance(node, yaml.SequenceNode) else [node]):
            value = self._build(source, key)
            if not isinstance(value, dict):
                _refuse(source.start_mark, "only mappings can be merged: use <<: *NAME of one")
            content.update(value)
        return content

    def _name(self, node: yaml.Node) -> str:
        name = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            _refuse(
                node.start_mark,
                'a key is not text: use lines such as chunk_tokens: 256, or quotes, as in "1"',
            )
        if len(name) > MAX_KEY_CHARACTERS:
            _refuse(node.start_mark, f"a key has more than {MAX_KEY_CHARACTERS} characters: shorten it")
        return name

    def _scalar(self, node: yaml.Node) -> object:
        if node.tag not in _SCALARS:
            _refuse(node.start_mark, "settings use no tags: put text that begins with ! or is = in quotes")
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARACTERS:
            _refuse(node.start_mark, f"a number of {len(node.value)} characters: use a shorter one")
        try:
            value: object = self.construct_object(node)
            if isinstance(value, str):
                value.encode()
        except UnicodeError:
            _refuse(node.start_mark, "an escape that is no character: write the character itself")
        except (ArithmeticError, LookupError, ValueError):
            kind = node.tag.removeprefix(_TAG)
            _refuse(node.start_mark, f"not a valid {kind}: write the value without a tag, or in quotes")
        return value


def _is_merge(node: yaml.Node) -> bool:
    return bool(node.tag == _TAG + "merge")


def _loader(path: Path, data: bytes) -> _Loader:
    """Return a loader of the text. Like YAML, UTF-16 if it begins with a byte order mark."""
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_yaml(path, f"line {line}: not {encoding.upper()} text") from None
    try:
        return _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _not_yaml(path, f"line {line}: a control character") from None


def _not_yaml(path: Path, problem: str) -> SettingsError:
    return SettingsError(f"the settings file {path} is not YAML: {problem}")


def _position(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
