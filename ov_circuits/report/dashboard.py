"""The offline page: one HTML file that holds template, style, script, plotly and data.

The data road is payload (a dict, see `payload.py`) -> blocks -> page:

1. Arrays are lifted out of the payload, so that their bytes are compressed once and decoded only for the head that is looked at.
2. The rest is cut into `core` (what the atlas needs to paint) and the sections that are read when they are first looked at.
3. Every block is gzip + base64 in a script element that browsers do not execute; the page inflates it when it is first needed.

A page never loads anything: its content security policy allows no source but the three scripts written here, by their hashes.
Token text is JSON inside compressed blocks, so nothing in a vocabulary can end an element or start one.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ov_circuits.report.results import Results

# Six digits are more than any chart can show, and half of what float64 would cost in the file.
_DIGITS = "%.6g"
# Sections of the payload in blocks of their own; the page inflates them when they are first looked at.
_LAZY = ("cards", "search", "composition", "spaces", "examples", "prompt_set", "generation")
# The page's script, in the order in which its parts lean on each other; together they are one function's body.
_SCRIPTS = (
    "blocks.js",  # data blocks of the file
    "text.js",  # numbers and tokens as text
    "colour.js",
    "document.js",  # elements and tooltips
    "filter.js",  # the filter language
    "model.js",  # the page's data and state
    "parts.js",  # map, strips, bars, heat maps
    "charts.js",  # what plotly draws
    "atlas.js",
    "examples.js",  # a card's examples from a text
    "head.js",  # a head's card: one function a section
    "paths.js",  # the composition view
    "prompt.js",
    "ablation.js",  # the prompt view's ablations
    "sets.js",  # prompt sets
    "generation.js",  # continuations
    "compare.js",
    "shell.js",  # header, theme, addresses
)
# The table that stands in for the page where scripts are disabled shows this many scores.
_STATIC_SCORES = 6
# Runs before the body is painted, so that a dark page never flashes white.
_THEME_SCRIPT = (
    "try{var t=localStorage.getItem('ov-circuits-theme')}catch(e){}"
    "document.documentElement.dataset.theme=t==='dark'||t==='light'?t:"
    "matchMedia('(prefers-color-scheme: dark)').matches?'dark':'light';"
    "document.documentElement.classList.add('js')"
)
# What stands around the page in a notebook. Where the notebook is not trusted, or is shown by a site that lets no frame
# through, frame, style and script are taken out, and the table beside them is what is left.
_FRAME_STYLE = (
    ".ov-frame{width:100%;height:860px;border:1px solid rgb(128 128 128/.4);border-radius:6px}"
    ".ov-frame~.ov-instead{display:none}"
)
# The frame cannot see the notebook: it asks, and is told whether the text around it is light or dark, now and when that changes.
_FRAME_SCRIPT = """(() => {
// A script runs where it stands, but in VS Code at the end of the cell's output.
const before = document.currentScript.previousElementSibling;
const frame = before?.matches('.ov-frame') ? before : before?.querySelector('.ov-frame');
if (!frame) return;
const tell = () => {
  const pen = document.createElement('canvas').getContext('2d');
  pen.fillStyle = getComputedStyle(frame.parentElement).color;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b] = pen.getImageData(0, 0, 1, 1).data;
  frame.contentWindow?.postMessage({ ovTheme: r + g + b > 384 ? 'dark' : 'light' }, '*');
};
addEventListener('message', (event) => { if (event.source === frame.contentWindow) tell(); });
new MutationObserver(() => setTimeout(tell, 200)).observe(document.body, { attributes: true });
})();"""


@dataclass(frozen=True, eq=False)
class Dashboard:
    """The page of a model, held as its payload; built when it is first asked for.

    >>> ov.dashboard(model, trace).save("report.html")  # doctest: +SKIP

    Attributes:
        payload: what it shows.
        results: what that was made from; None for a page of other data.
    """

    payload: dict[str, Any]
    results: Results | None = None

    @cached_property
    def html(self) -> str:
        """The whole page, one string."""
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

        blocks = _blocks(self.payload)
        script, style = _script(), _asset("page.css")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        plotly = _plotly_source()
        meta = self.payload["meta"]
        return environment.from_string(_asset("page.html.jinja")).render(
            title=_printable(self.payload["title"]),
            version=meta["version"],
            hashes=[_csp_hash(source) for source in (_THEME_SCRIPT, script, plotly)],
            style=Markup(style),
            theme_script=Markup(_THEME_SCRIPT),
            script=Markup(script),
            core=blocks.pop("core"),
            blocks=blocks,
            plotly=_packed_plotly(),
            table=_static_table(self.payload),
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to `path`, whole or not at all, and return the path."""
        from ov_circuits.files import atomic_path

        with atomic_path(path) as temporary:
            Path(temporary).write_bytes(self.html.encode("utf-8"))
        return Path(path)

    def _repr_html_(self) -> str:
        # A frame of its own keeps two pages in one notebook apart, and `sandbox` keeps the page away from the notebook.
        table = _static_table(self.payload)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table["header"])
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table["rows"])
        title = html.escape(_printable(self.payload["title"]), quote=True)
        return (
            f'<div class="ov-page"><style>{_FRAME_STYLE}</style>'
            f'<iframe class="ov-frame" title="{title}" sandbox="allow-scripts" '
            f'srcdoc="{html.escape(self.html, quote=True)}"></iframe><script>{_FRAME_SCRIPT}</script>'
            f'<div class="ov-instead"><p><b>{title}</b>: the table of heads alone. The page itself shows in a trusted notebook, '
            "and <code>.save(file)</code> writes it.</p>"
            f'<div style="max-height:420px;overflow:auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            "</div></div></div>"
        )

    def __repr__(self) -> str:
        meta = self.payload["meta"]
        return (
            f"Dashboard({meta['model']!r}, {meta['n_layers']} layers x {meta['n_heads']} heads, view={meta['view']!r})"
        )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf-8").replace("\r\n", "\n")


@cache
def _script() -> str:
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f"'use strict';\n(() => {{\n{parts}\n}})();"


def _blocks(payload: dict[str, Any]) -> dict[str, str]:
    """Compressed parts of the page by name: `core`, the sections read later, and `array-0`, `array-1`, ... for arrays."""
    arrays: dict[str, str] = {}

    def number(value: float) -> float | None:
        # JSON has no NaN; a score that does not exist is null on the page.
        return float(_DIGITS % value) if math.isfinite(value) else None

    def lift(node: Any) -> Any:
        if isinstance(node, float):
            return number(node)
        if isinstance(node, (list, tuple)):
            # A page holds a million numbers, most of them in lists of nothing else.
            return [number(child) if type(child) is float else lift(child) for child in node]
        if isinstance(node, dict):
            if "dtype" in node and "shape" in node and "data" in node:
                name = f"array-{len(arrays)}"
                arrays[name] = _pack(base64.b64decode(node["data"]))
                return {
                    "dtype": node["dtype"],
                    "shape": list(node["shape"]),
                    "scale": node.get("scale", 1.0),
                    "block": name,
                }
            return {key: lift(child) for key, child in node.items()}
        return node

    later = {key: payload[key] for key in _LAZY if payload.get(key) is not None}
    core = {key: value for key, value in payload.items() if key not in later}
    core["later"] = list(later)
    packed = {name: _pack(_json(lift(part))) for name, part in {"core": core, **later}.items()}
    return {**packed, **arrays}


def _json(value: Any) -> bytes:
    # ASCII only: lone surrogates (undecodable bytes of a vocabulary) survive as escapes.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def _pack(data: bytes) -> str:
    """gzip + base64. zlib's gzip header holds no time and no name, so the same data give the same bytes."""
    packer = zlib.compressobj(level=7, wbits=31)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode("ascii")


@cache
def _plotly_source() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@cache
def _packed_plotly() -> str:
    return _pack(_plotly_source().encode("utf-8"))


def _csp_hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")


def _printable(text: str) -> str:
    """Control characters and lone surrogates have no place in a title."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _static_table(payload: dict[str, Any]) -> dict[str, list[Any]]:
    """What a reader without scripts sees: one row a head, the first scores of the board."""
    scores = payload["scores"][:_STATIC_SCORES]
    n_heads = payload["meta"]["n_heads"]
    columns = [payload["values"][score["key"]] for score in scores]
    rows = [
        [
            f"{i // n_heads}.{i % n_heads}",
            *("" if v is None or not math.isfinite(v) else f"{v:.3g}".replace("-", "\N{MINUS SIGN}") for v in values),
        ]
        for i, values in enumerate(zip(*columns, strict=True))
    ]
    return {"header": ["Head", *(score["label"] for score in scores)], "rows": rows}
