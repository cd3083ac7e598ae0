"""One look for the notebooks' figures, and a still picture beside each interactive one.

GitHub and most mail readers show no plotly figure. ``show`` therefore puts a PNG into the same output where kaleido and a
Chromium are at hand (``pip install kaleido pillow``); without them only the interactive figure is emitted, and nothing fails.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import warnings
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
import torch
from IPython.display import display

# tqdm says so wherever ipywidgets is not installed; progress bars are not used here.
warnings.filterwarnings("ignore", message="IProgress not found")

INK, QUIET, RULE = "#262626", "#6b6b6b", "#d9d9d9"
# Okabe & Ito's colours, told apart with any colour vision: highlights first, grey for everything else.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#a6a6a6"
# Negative, nothing, positive, the way round that pages and ov.figures have; zero is white (use with zmid=0).
DIVERGING = [[0.0, "#08456f"], [0.25, "#62a1cb"], [0.5, "#ffffff"], [0.75, "#e08f52"], [1.0, "#8c3a04"]]
# Nothing to much.
SEQUENTIAL = [[0.0, "#ffffff"], [0.25, "#c3dbeb"], [0.5, "#7bb0d4"], [0.75, "#2f7fb5"], [1.0, "#08456f"]]

_bar = dict(thickness=10, outlinewidth=0, tickfont=dict(size=12, color=QUIET), title=dict(font=dict(size=12, color=QUIET), side="right"))
_axis = dict(
    showgrid=False, zeroline=False, showline=True, linecolor=RULE, ticks="outside", ticklen=4, tickcolor=RULE, ticklabelstandoff=3,
    title=dict(font=dict(size=13, color=QUIET), standoff=8), tickfont=dict(size=12, color=QUIET), automargin=True,
)
TEMPLATE = go.layout.Template(
    layout=dict(
        font=dict(family="Helvetica, Arial, sans-serif", size=13, color=INK),
        title=dict(font=dict(size=15, color=INK), x=0.0, xref="paper", xanchor="left", yref="container", y=1.0,
                   yanchor="top", pad=dict(t=14)),
        paper_bgcolor="white", plot_bgcolor="white", colorway=[BLUE, ORANGE, GREEN, PURPLE, GREY],
        margin=dict(l=64, r=24, t=72, b=56), xaxis=_axis, yaxis=_axis,
        legend=dict(orientation="h", x=0, y=1.0, xanchor="left", yanchor="bottom", font=dict(size=12, color=QUIET)),
        hoverlabel=dict(bgcolor="white", font=dict(color=INK)),
    ),
    data=dict(heatmap=[dict(colorbar=_bar)]),
)


def numbers(values: torch.Tensor, digits: int = 4) -> list[Any]:
    """A tensor as nested lists, rounded: small to store, readable by every version of plotly.js."""
    scale = 10**digits
    return ((values.detach().double() * scale).round() / scale).tolist()


def show(figure: go.Figure, width: int = 760, height: int = 380) -> None:
    """Display a figure in the notebooks' style: interactive, and as a picture where one can be made."""
    figure.update_layout(template=TEMPLATE, width=width, height=height)
    figure.update_annotations(font=dict(size=12, color=QUIET))
    bundle: dict[str, Any] = {
        "application/vnd.plotly.v1+json": json.loads(pio.to_json(figure)),
        "text/plain": f"Figure: {figure.layout.title.text}",
    }
    picture = _picture(figure)
    if picture is not None:
        bundle["image/png"] = base64.b64encode(picture).decode()
    display(bundle, raw=True)


def _picture(figure: go.Figure) -> bytes | None:
    """The figure as PNG at one and a half times its size; None where kaleido or Chromium is missing or does not start.

    256 colours are enough for these figures and make a third of the file.
    """
    logging.disable()  # now and then a message from Chromium breaks off: it is logged, the picture comes all the same
    try:
        import kaleido  # noqa: F401
        from PIL import Image

        picture = Image.open(io.BytesIO(figure.to_image(format="png", scale=1.5))).convert("RGB").quantize(256)
        small = io.BytesIO()
        picture.save(small, "PNG", optimize=True)
        return small.getvalue()
    except Exception:  # the picture is an extra: whatever fails in another program, the notebook goes on
        return None
    finally:
        logging.disable(logging.NOTSET)
