"""Hooks of mkdocs: the site has the layout of the repository, and its API reference is complete.

Pages keep their paths, so that relative links work on a code host and in the site alike. The site consists of
the files in ``docs`` and of everything that its pages link to: Markdown as pages, a folder as a page with its
README and its files, all other files unchanged.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import griffe
from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from jinja2 import Environment
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SHOWN = ("examples", "plugins", "tests")
"""Where the page of a folder shows its files."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|[/#])([^)\s#]+)")
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)
IMPORT = re.compile(r"^from (kvtier[\w.]*) import (.+)$", re.MULTILINE)
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|exc):``?(~?)([\w.]+)``?")
HIDDEN = re.compile(r"^\.|^__pycache__$|\.egg-info$|^README\.md$")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}

logger = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of ``docs`` by those of the site, under their paths in the repository."""
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    queue = [ROOT / "README.md", *(path for path in sorted(ROOT.glob("docs/**/*")) if path.is_file())]
    while queue:
        path = queue.pop(0)
        path = path / "README.md" if path.is_dir() else path
        name = path.relative_to(ROOT).as_posix()
        if name in site.src_uris or not (path.exists() or _is_shown(path)):
            continue
        if path.suffix == ".md":
            text = _folder_page(path.parent) if _is_shown(path) else path.read_text()
            inclusion = InclusionLevel.NOT_IN_NAV if _is_shown(path) else InclusionLevel.UNDEFINED
            site.append(File.generated(config, name, content=text, inclusion=inclusion))
            queue += [_target(link, path) for link in LINK.findall(text)]
        else:
            site.append(File.generated(config, name, abs_src_path=str(path)))
    return site


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to folders point to their pages."""
    path = ROOT / page.file.src_uri
    return LINK.sub(lambda link: link[1] + "/README.md" * _target(link[1], path).is_dir(), markdown)


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Warn of public names that the API reference lacks, or that have no docstring."""
    package = griffe.load("kvtier", search_paths=[ROOT], allow_inspection=False, resolve_aliases=True)
    pages = files.documentation_pages()
    listed = {name for page in pages for name in DIRECTIVE.findall(page.content_string)}
    public = {f"kvtier.{name}" for name in package.exports or ()} | set(_names_for_plugins()) | listed
    objects = [package[name.removeprefix("kvtier.")] for name in sorted(public)]
    for name, has_docstring in dict.fromkeys(found for item in objects for found in _names_in(item)):
        if not has_docstring:
            logger.warning("%s is public, and has no docstring", name)
        try:
            config.plugins["autorefs"].get_item_url(name)  # type: ignore[attr-defined]
        except KeyError:
            logger.warning("%s is public, and missing in docs/api", name)


def _names_for_plugins() -> Iterator[str]:
    """Yield the names that the examples for plugins import: documented there, and therefore public."""
    for page in (ROOT / "docs" / "extending").glob("*.md"):
        for module, names in IMPORT.findall(page.read_text()):
            yield from (f"{module}.{name.strip()}" for name in names.split(","))


def _names_in(item: griffe.Object | griffe.Alias) -> Iterator[tuple[str, bool]]:
    """Yield an object and its public members, and whether each has a docstring.

    Attributes of classes are not included: the docstring of the class may describe them.
    """
    item = item.final_target if item.is_alias else item
    yield item.path, item.has_docstring
    for name, member in item.members.items():
        is_field = item.is_class and member.is_attribute and "property" not in member.labels
        if not (name.startswith(("_", "test_")) or member.is_alias or is_field):
            yield from _names_in(member)


def _is_shown(path: Path) -> bool:
    """Whether this is the page of a folder that shows its files."""
    return path.name == "README.md" and path.parent.is_dir() and path.relative_to(ROOT).parts[0] in SHOWN


def _target(link: str, path: Path) -> Path:
    return Path(os.path.normpath(path.parent / link))


def _folder_page(folder: Path) -> str:
    """Return the README of a folder, followed by its other files and links to its folders."""
    readme = folder / "README.md"
    parts = [readme.read_text() if readme.exists() else f"# {folder.relative_to(ROOT)}\n"]
    paths = [path for path in sorted(folder.iterdir()) if not HIDDEN.search(path.name)]
    if folders := [path.name for path in paths if path.is_dir()]:
        parts.append("Folders: " + ", ".join(f"[{name}]({name})" for name in folders) + "\n")
    parts += [
        f"## `{path.name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"
        for path in paths
        if path.is_file() and path.stat().st_size
    ]
    return "\n".join(parts)


class DocstringMarkup(griffe.Extension):
    """Converts the reStructuredText in docstrings to Markdown: roles become links, ``::`` ends no line."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Convert one docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda role: _reference(role, obj), obj.docstring.value)
            obj.docstring.value = re.sub(r":(:)$|^::$", r"\1", text, flags=re.MULTILINE)


def _reference(role: re.Match[str], obj: griffe.Object) -> str:
    """Return a link to the object that a role names, or its name if the site does not contain it."""
    is_short, name = role.groups()
    try:
        path = name if name.startswith("kvtier.") else obj.resolve(name)
    except griffe.NameResolutionError:
        path = name
    title = name.rpartition(".")[2] if is_short else name
    return f'<autoref optional identifier="{path}"><code>{title}</code></autoref>'
