"""The documentation: these pages and the docstrings, as HTML that loads nothing from outside.

    sphinx-build -W -b html docs build/docs

Docstrings are plain text with formulas in them, ``||A B||_F``, which reStructuredText would take for markup of its own: they
are escaped on the way, and indented formulas are kept as they stand. Where a page says ``<!-- scores -->`` or
``<!-- commands -->``, the list is made from the package itself.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import ov_circuits
from ov_circuits import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "ov_circuits"
author = copyright = "ov_circuits contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ov_circuits {__version__}"
html_static_path, html_css_files = ["_static"], ["wide.css"]
highlight_language = "none"  # formulas
html_show_sphinx = html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of a dataclass are listed once, by its docstring
suppress_warnings = ["myst.xref_missing"]  # README and CHANGELOG link to files of the repository

_CODE = re.compile(r"(``.+?``|:\w+:`[^`]*`|`[^`]+`|(?<!\w)\*\w+\*(?!\w))")
_MARKUP = re.compile(r"[|*]|(?<=\w)_(?!\w)")
_COLON = "\ue000"
# Public names are documented under the name that users write, wherever they live.
_PUBLIC = {f"ov_circuits.{home}.{name}": f"ov_circuits.{name}" for name, home in ov_circuits._HOMES.items()}
_REFERENCE = re.compile(r"`~?(ov_circuits\.[\w.]+)`")


def _as_markup(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A docstring's plain text as reStructuredText."""
    if what == "property":  # napoleon would take what stands before a colon for a type
        end = lines.index("") if "" in lines else len(lines)
        lines[:end] = [
            line.replace(":", _COLON) if "`" not in line else line.replace(": ", f"{_COLON} ") for line in lines[:end]
        ]
    kept: list[str] = []
    literal: int | None = None  # indent of the text above a formula that stands by itself
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is None and line.strip() and i > 1 and not lines[i - 1].strip():
            above = next((text for text in reversed(lines[:i]) if text.strip()), "")
            above_indent = len(above) - len(above.lstrip())
            if indent >= above_indent + 4:
                literal = above_indent
                if not above.endswith("::"):
                    kept += [" " * above_indent + "::", ""]
        kept.append(line if literal is not None else _escaped(line))
    lines[:] = kept


def _restore_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def _escaped(line: str) -> str:
    parts = _CODE.split(line)
    parts[::2] = [_MARKUP.sub(lambda sign: "\\" + sign[0], part) for part in parts[::2]]
    parts[1::2] = [_REFERENCE.sub(lambda found: f"`{_PUBLIC.get(found[1], found[1])}`", part) for part in parts[1::2]]
    return "".join(parts)


def _score_table() -> str:
    from ov_circuits.scores.board import all_scores, null_note

    rows = ["| score | what it is | source | by chance |", "|---|---|---|---|"]
    for key, score in all_scores().items():
        cells = (f"`{key}`", f"{score.label}. {score.note}", score.source, null_note(key))
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |")
    return "\n".join(rows)


def _command_pages() -> str:
    """``--help`` of every command, as a terminal without colours shows it."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from ov_circuits.cli import app as commands

    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "TERMINAL_WIDTH": "110"}
    os.environ.update(plain)
    pages = []
    for command in get_command(commands).commands:  # type: ignore[attr-defined]
        text = CliRunner().invoke(commands, [command, "--help"], env=plain, prog_name="ov-circuits").stdout
        body = "\n".join(line.rstrip() for line in text.strip().splitlines())
        pages.append(f"## ov-circuits {command}\n\n```\n{body}\n```")
    return "\n\n".join(pages)


def _fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    for mark, made in (("<!-- scores -->", _score_table), ("<!-- commands -->", _command_pages)):
        if mark in source[0]:
            source[0] = source[0].replace(mark, made())


def setup(app: Sphinx) -> None:
    """Around napoleon, which reads the sections of a docstring at priority 500."""
    app.connect("autodoc-process-docstring", _as_markup, priority=400)
    app.connect("autodoc-process-docstring", _restore_colons, priority=600)
    app.connect("source-read", _fill_in)
