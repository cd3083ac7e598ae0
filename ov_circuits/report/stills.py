"""Figures as PNG and SVG: by a Chromium that is on the PATH, otherwise by kaleido.

Plotly draws in a browser alone. All figures go through one start of Chromium (kaleido starts one for each picture), in a page whose
random numbers are seeded: plotly names parts of a drawing at random, and the same figures should give the same bytes.
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ov_circuits.errors import CircuitsError

if TYPE_CHECKING:
    import plotly.graph_objects as go

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_NEEDS = "pictures need a browser to draw them: install Chromium, or kaleido (pip install kaleido)"
_SCALE = 2
# A start of the browser, and a figure, on a machine that has much else to do.
_START_LIMIT_S, _FIGURE_LIMIT_S = 120, 10

_PAGE = """<!doctype html><meta charset="utf-8"><body><script>
let state = 1;
Math.random = () => { state = (state * 48271) % 2147483647; return state / 2147483647; };
</script><script>{plotly}</script><script>
(async () => {{
  const done = {{}};
  for (const [name, figure] of Object.entries({figures})) {{
    const {{ width = 900, height = 480 }} = figure.layout;
    const drawn = await Plotly.newPlot(document.createElement('div'), figure.data, {{ ...figure.layout, width, height }});
    const still = (format, scale) => Plotly.toImage(drawn, {{ format, width, height, scale }});
    // The first drawing of a legend may measure its text before the fonts are there: it is thrown away.
    await still('svg', 1);
    await document.fonts.ready;
    done[name] = {{ svg: await still('svg', 1), png: await still('png', {scale}) }};
  }}
  const out = document.createElement('pre');
  out.textContent = JSON.stringify(done);
  document.body.replaceChildren(out);
}})().catch((error) => {{ document.body.textContent = `failed: ${{error}}`; }});
</script></body>"""


def why_no_stills() -> str | None:
    """What to install where nothing can draw pictures; None where something can."""
    return None if _has_kaleido() or _browser() else _NEEDS


def stills(figures: dict[str, go.Figure]) -> dict[str, bytes]:
    """``name.svg`` and ``name.png`` of every figure.

    Raises:
        CircuitsError: nothing is there to draw them, or it failed.
    """
    browser = _browser()
    if browser is not None:
        return _by_browser(browser, figures)
    if not _has_kaleido():
        raise CircuitsError(_NEEDS)
    return _by_kaleido(figures)


def _has_kaleido() -> bool:
    return importlib.util.find_spec("kaleido") is not None


def _browser() -> str | None:
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def _by_kaleido(figures: dict[str, go.Figure]) -> dict[str, bytes]:
    drawn = {}
    for name, figure in figures.items():
        size = {"width": figure.layout.width or 900, "height": figure.layout.height or 480}
        figure = type(figure)(figure)
        for k, trace in enumerate(figure.data):
            trace.uid = f"-{k}"  # plotly would choose one at random
        try:
            svg = figure.to_image(format="svg", **size)
            drawn[f"{name}.png"] = figure.to_image(format="png", scale=_SCALE, **size)
        except Exception as error:  # whatever fails in a program that is not ours is told in its own words
            raise CircuitsError(f"kaleido could not draw {name}: {str(error).splitlines()[0]}") from error
        drawn[f"{name}.svg"] = _renamed(svg.decode("utf-8")).encode("utf-8")
    return drawn


def _by_browser(browser: str, figures: dict[str, go.Figure]) -> dict[str, bytes]:
    import plotly.io as pio
    from plotly.offline import get_plotlyjs

    # Inside a script, "</" would end it and "<!--<script" keep it from ending: no "<" is left in the data.
    parts = {name: json.loads(pio.to_json(figure)) for name, figure in figures.items()}
    for figure in parts.values():
        for k, trace in enumerate(figure["data"]):
            trace["uid"] = f"-{k}"  # plotly would choose one at random
    data = json.dumps(parts).replace("<", "\\u003c")
    limit = _START_LIMIT_S + _FIGURE_LIMIT_S * len(figures)
    with tempfile.TemporaryDirectory(prefix="ov-circuits-") as folder:
        page = Path(folder) / "figures.html"
        page.write_text(_filled(get_plotlyjs(), data), "utf-8")
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={folder}/profile",
            f"--virtual-time-budget={limit * 1000}",
            "--dump-dom",
            page.as_uri(),
        ]
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # Chromium's sandbox refuses root; the page is our own
            command.insert(1, "--no-sandbox")
        try:
            run = subprocess.run(command, capture_output=True, timeout=limit, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CircuitsError(f"{browser} did not draw the figures: {error}; {_NEEDS}") from error
    found = re.search(r"<pre>(.*?)</pre>", run.stdout.decode("utf-8", "replace"), re.DOTALL)
    if found is None:
        said = run.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CircuitsError(
            f"{browser} did not draw the figures ({said[-1][:200] if said else 'it said nothing'}); {_NEEDS}"
        )
    drawn = {}
    for name, urls in json.loads(html.unescape(found[1])).items():
        drawn[f"{name}.svg"] = _renamed(unquote(urls["svg"].partition(",")[2])).encode("utf-8")
        drawn[f"{name}.png"] = b64decode(urls["png"].partition(",")[2])
    return drawn


def _filled(plotly: str, data: str) -> str:
    """The page; plotly and the data hold braces, so they are put in last."""
    page = _PAGE.replace("{{", "{").replace("}}", "}").replace("{scale}", str(_SCALE))
    return page.replace("{plotly}", plotly, 1).replace("{figures}", data, 1)


def _renamed(svg: str) -> str:
    """Plotly's random name of a drawing, wherever it is part of an id, as a fixed one."""
    for name in sorted(set(re.findall(r'id="defs-([0-9a-f]{6})"', svg))):
        svg = svg.replace(name, "figure")
    return svg
