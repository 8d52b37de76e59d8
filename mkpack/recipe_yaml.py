"""YAML text -> plain values with the line of every key, for error messages that say where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mkpack.errors import UserError, combine

Where = tuple[str | int, ...]


@dataclass
class Document:
    """A parsed file: `data` (lists as tuples), lines by key path, (line, text) problems, and the paths they hide."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[Where, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    skipped: set[Where] = field(default_factory=set)

    def line(self, where: Where) -> int:
        """Line, from 1, of the key at `where`, or of the nearest section around it."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


def read_document(path: Path) -> Document:
    """Reads a YAML file whose top is a mapping.

    Raises UserError when the file cannot be read or is not YAML; what is wrong with single keys (duplicates, aliases,
    values that YAML cannot read) is left in `problems`, so that the caller can add its own.
    """
    text = _read_text(Path(path))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise combine("recipe refused", [f"{path}:{_syntax(error, text)}"]) from None
    except RecursionError:
        raise combine("recipe refused", [f"{path}:1: nested too deep to be a recipe"]) from None
    if root is None:
        raise combine("recipe refused", [f"{path}:1: expected keys such as name and source, found an empty file"])
    line = root.start_mark.line + 1
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else f'the text "{root.value[:60]}"'
        raise combine("recipe refused", [f"{path}:{line}: expected keys such as name and source, found {found}"])
    document = Document(lines={(): line})
    document.data = _value(root, (), document, set())
    return document


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"recipe refused: {path}: no such file; expected the path of a recipe (YAML)") from None
    except IsADirectoryError:
        raise UserError(f"recipe refused: {path}: is a folder; expected the path of a recipe (YAML)") from None
    except UnicodeDecodeError as error:
        raise UserError(f"recipe refused: {path}: expected UTF-8 text, found byte {error.start} that is not") from None
    except (OSError, ValueError) as error:
        raise UserError(f"recipe refused: {path}: cannot be read: {error}") from None


def _syntax(error: yaml.YAMLError, text: str) -> str:
    """'line: what' of a YAML syntax error."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        if mark and error.context_mark and mark.index >= len(text.rstrip()):
            mark = error.context_mark  # the end of the file says nothing; where the unclosed thing began does
        line, lines = mark.line if mark else 0, text.splitlines()
        source = lines[line] if line < len(lines) else ""
        if "\t" in source[: len(source) - len(source.lstrip())] or "'\\t'" in str(error.problem):
            return f"{line + 1}: expected spaces, found a tab: YAML does not indent with tabs"
        if isinstance(error, yaml.composer.ComposerError) and "single document" in str(error.context):
            return f"{line + 1}: expected one document, found a second one after '---'"
        what = ", ".join(str(part) for part in (error.context, error.problem) if part)
        return f"{line + 1}: not YAML: {what}; near {source.strip()[:60]!r}"
    position = getattr(error, "position", 0)
    return f"{text.count(chr(10), 0, position) + 1}: not YAML: a character that YAML does not allow"


def _value(node: yaml.Node, where: Where, document: Document, seen: set[int]) -> Any:
    """The plain value of a node; problems are recorded and their value is None."""
    line = document.line(where)
    key = ".".join(str(k) for k in where)
    if id(node) in seen:
        document.problems.append((line, f"{key}: expected a value, found an alias (*name), which recipes do not use"))
        document.skipped.add(where)
        return None
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, where, document, seen)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            document.lines[(*where, i)] = item.start_mark.line + 1
            items.append(_value(item, (*where, i), document, seen))
        return tuple(items)
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, OverflowError):
        found = f"{node.tag.removeprefix('tag:yaml.org,2002:')} {node.value!r}"
        document.problems.append((line, f"{key}: expected a plain value, found one that YAML cannot read: {found}"))
        document.skipped.add(where)
        return None


def _mapping(node: yaml.MappingNode, where: Where, document: Document, seen: set[int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
            found = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a section or list"
            document.problems.append((line, f"{'.'.join(map(str, where))}: expected a key name, found {found!r}"))
            continue
        # A key is its text, also when YAML would read a number or a truth value in it.
        child = (*where, key_node.value)
        if key_node.value in values:
            key, first = ".".join(str(k) for k in child), document.lines[child]
            document.problems.append((line, f"{key}: duplicate key, first set in line {first}; remove one"))
            continue
        document.lines[child] = line
        values[key_node.value] = _value(value_node, child, document, seen)
    return values
