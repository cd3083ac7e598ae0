"""Figures: a frame or a tensor in, a plotly ``Figure`` out; nothing is read or computed anew. :func:`save` writes one.

>>> ov.figures.head_map(ov.scoreboard(model), "eigen_copying_full")  # doctest: +SKIP
>>> ov.figures.waterfall(trace.ledger(" Mary", " John")).update_layout(title="My title")  # doctest: +SKIP

They are plain figures: whatever plotly can restyle can be restyled. Their look is the template :func:`template`, light and for
paper; signed values are on a blue-orange map centred on zero, which every colour vision tells apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ov_circuits.arguments import checked
from ov_circuits.errors import CircuitsError
from ov_circuits.report.text import visible

if TYPE_CHECKING:
    import plotly.graph_objects as go

F = TypeVar("F", bound=Callable[..., Any])

_INK, _SOFT, _RULE, _ACCENT, _BAR = "#1e1d1b", "#5f5b54", "#e2ded5", "#0b6764", "#c9c4b9"
_UP, _DOWN = "#c26c1c", "#2f6db3"
DIVERGING = [[0.0, "#123a78"], [0.25, "#6c9bd3"], [0.5, "#f4f2ed"], [0.75, "#eda25c"], [1.0, "#9a4300"]]
SEQUENTIAL = [[0.0, "#f4f2ed"], [0.33, "#9dcdc7"], [0.67, "#23807c"], [1.0, "#073b3d"]]
# Okabe & Ito's colours, dashes, and places side by side: the kinds are told apart without colour as well.
_KINDS = {"Q": ("#0072b2", "dash", -0.06), "K": ("#c24e00", "solid", 0.0), "V": ("#00795a", "dot", 0.06)}


def _drawn(draw: F) -> F:
    """A figure of a frame: arguments are of the annotated kinds, and what a frame of another origin lacks is named.

    Raises:
        CircuitsError: from the function that is given back: an argument of another kind, or a frame without what is drawn.
    """

    @wraps(draw)
    def figure(*args: Any, **kwargs: Any) -> Any:
        try:
            return draw(*args, **kwargs)
        except KeyError as error:
            given = next(iter(args or kwargs.values()), None)
            if not isinstance(given, pd.DataFrame) or error.args[0] in (*given.columns, *given.attrs):
                raise
            raise CircuitsError(
                f"figures.{draw.__name__} draws another frame: this one has no {error.args[0]!r}; "
                f"see help(ov.figures.{draw.__name__}) for whose frame it takes"
            ) from error

    return checked(figure)  # type: ignore[return-value]


@cache
@checked
def template() -> go.layout.Template:
    """The look of all figures."""
    import plotly.graph_objects as go

    axis = {
        "gridcolor": _RULE,
        "zerolinecolor": "#aaa498",
        "linecolor": _RULE,
        "automargin": True,
        "tickfont": {"size": 12, "color": _SOFT},
        "title": {"font": {"size": 13, "color": _SOFT}, "standoff": 8},
    }
    bar = {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 12, "color": _SOFT}, "title": {"side": "right"}}
    return go.layout.Template(
        layout={
            "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": _INK},
            "title": {"font": {"size": 16}, "x": 0.0, "xref": "paper", "xanchor": "left"},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "margin": {"l": 60, "r": 24, "t": 56, "b": 52},
            "xaxis": axis,
            "yaxis": axis,
            "coloraxis": {"colorbar": bar},
            "showlegend": False,
        },
        data={"heatmap": [{"colorbar": bar, "xgap": 1, "ygap": 1}]},
    )


# -- all heads --------------------------------------------------------------------------------------------------------


@_drawn
def head_map(board: pd.DataFrame, score: str) -> go.Figure:
    """One score as a map, layers down and heads across.

    Args:
        board: of :func:`ov_circuits.scoreboard`, or any frame with ``layer``, ``index`` and the score's column.
        score: the column; on a map centred on zero where it holds negative values.
    """
    grid = board.pivot(index=_numbers(board, "layer"), columns=_numbers(board, "index"), values=_numbers(board, score))
    figure = _heat(grid.to_numpy(), title=_label(score), x=grid.columns.tolist(), y=grid.index.tolist())
    figure.update_traces(hovertemplate="head %{y}.%{x}<br>%{z:.4g}<extra></extra>")
    figure.update_layout(
        xaxis={"title": {"text": "head"}, "dtick": 1 if grid.shape[1] <= 16 else 4},
        yaxis={"title": {"text": "layer"}, "dtick": 1 if len(grid) <= 16 else 2},
        height=max(380, 130 + 22 * len(grid)),
    )
    return figure


@_drawn
def score_scatter(board: pd.DataFrame, x: str, y: str, colour: str = "layer") -> go.Figure:
    """Two columns of the scoreboard against each other, one point a head."""
    import plotly.graph_objects as go

    values = board[_numbers(board, colour)]
    marker = {"size": 9, "line": {"width": 0.75, "color": "#8b857a"}, "color": values, **_scale(values, _label(colour))}
    figure = go.Figure(
        go.Scatter(
            x=board[_numbers(board, x)],
            y=board[_numbers(board, y)],
            mode="markers",
            text=board["head"],
            marker=marker,
            hovertemplate="head %{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        )
    )
    return _finish(figure, f"{_label(y)} against {_label(x)}", x=_label(x), y=_label(y))


@_drawn
def space_map(frame: pd.DataFrame, space: str = "write") -> go.Figure:
    """All heads by what they ``write`` or ``read``: the frame of :func:`ov_circuits.space_map`, coloured by layer."""
    import plotly.graph_objects as go

    if space not in ("write", "read"):
        raise CircuitsError(f"there is no map of {space!r}: choose write or read")
    shares = frame.attrs.get("shares", {}).get(space, (float("nan"),) * 2)
    layer = frame["layer"]
    marker = {"size": 9, "line": {"width": 0.75, "color": "#8b857a"}, "color": layer, **_scale(layer, "layer")}
    figure = go.Figure(
        go.Scatter(
            x=frame[f"{space}_x"],
            y=frame[f"{space}_y"],
            mode="markers",
            text=frame["head"],
            marker=marker,
            hovertemplate="head %{text}<extra></extra>",
        )
    )
    names = [f"component {i + 1} ({100 * share:.1f} % of the variance)" for i, share in enumerate(shares)]
    return _finish(figure, f"Heads by their {space} spaces", x=names[0], y=names[1])


@_drawn
def composition_graph(frame: pd.DataFrame, n: int = 60) -> go.Figure:
    """The ``n`` strongest paths as a layered graph: a frame of :func:`ov_circuits.composition`, by falling ``z_paired``."""
    import plotly.graph_objects as go

    paths = frame.nlargest(n, "z_paired")
    if paths.empty:
        raise CircuitsError("there is no path to draw: the frame holds no pair with a z")
    figure = go.Figure()
    for kind, rows in paths.groupby("kind", sort=True):
        colour, dash, shift = _KINDS[str(kind)]
        xs: list[float | None] = []
        ys: list[float | None] = []
        for sender, receiver in zip(rows["sender"], rows["receiver"], strict=True):
            for layer, head in (_place(sender), _place(receiver)):
                xs.append(head + shift)
                ys.append(layer)
            xs.append(None)
            ys.append(None)
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="lines",
            name=f"{kind}-composition",
            line={"color": colour, "dash": dash, "width": 1.5},
            hoverinfo="skip",
            showlegend=True,
        )
    labels = sorted({*paths["sender"], *paths["receiver"]}, key=_place)
    figure.add_scatter(
        x=[_place(label)[1] for label in labels],
        y=[_place(label)[0] for label in labels],
        mode="markers+text",
        text=labels,
        textfont={"size": 10},
        marker={"size": 26, "color": "white", "line": {"width": 1, "color": "#8b857a"}},
        hovertemplate="head %{text}<extra></extra>",
        showlegend=False,
    )
    _finish(figure, f"The {len(paths)} strongest paths", x="head", y="layer")
    layers = [_place(label)[0] for label in labels]
    return figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        xaxis={"zeroline": False, "dtick": 1},
        yaxis={"autorange": "reversed", "zeroline": False, "dtick": 1},
        height=max(380, 150 + 34 * (1 + max(layers) - min(layers))),
    )


# -- one head ---------------------------------------------------------------------------------------------------------


@_drawn
def spectrum(values: pd.DataFrame | Float[Tensor, " k"]) -> go.Figure:
    """Singular values as bars, and their band by chance where there is one.

    Args:
        values: the frame of :func:`ov_circuits.spectrum`, or singular values alone.
    """
    import plotly.graph_objects as go

    frame = values
    if isinstance(frame, Tensor):
        frame = pd.DataFrame({"index": range(len(frame)), "value": frame.tolist()})
    figure = go.Figure(go.Bar(x=frame["index"], y=frame["value"], marker={"color": _ACCENT}, name="singular values"))
    note = ""
    if "null_low" in frame:
        edge = {"mode": "lines", "line": {"width": 1, "color": _SOFT}, "hoverinfo": "skip"}
        figure.add_scatter(x=frame["index"], y=frame["null_low"], **edge)
        figure.add_scatter(
            x=frame["index"], y=frame["null_high"], fill="tonexty", fillcolor="rgba(95,91,84,0.22)", **edge
        )
        note = f"<br><sup>grey, by chance: {_plain(frame.attrs['null'])}</sup>" if "null" in frame.attrs else ""
    head = frame.attrs.get("head")
    title = "Singular values of W_V W_O" + (f", head {head}" if head else "")
    return _finish(figure, title + note, x="index", y="singular value").update_layout(bargap=0.25)


@_drawn
def eigenvalues(values: Tensor, name: str = "OV") -> go.Figure:
    """Eigenvalues in the complex plane, both axes to one scale; positive real parts orange, negative ones blue."""
    import plotly.graph_objects as go

    points = values.detach().cpu().to(torch.complex128)
    colours = [_UP if real >= 0 else _DOWN for real in points.real.tolist()]
    figure = go.Figure(
        go.Scatter(
            x=points.real.tolist(),
            y=points.imag.tolist(),
            mode="markers",
            marker={"size": 9, "color": colours, "line": {"width": 0.75, "color": "white"}},
            hovertemplate="%{x:.4g} + %{y:.4g} i<extra></extra>",
        )
    )
    reach = 1.1 * max(float(points.abs().max()) if len(points) else 0.0, 1e-12)
    _finish(figure, f"Eigenvalues of {_plain(name)}", x="real part", y="imaginary part")
    return figure.update_layout(
        xaxis={"range": [-reach, reach]},
        yaxis={"range": [-reach, reach], "scaleanchor": "x", "constrain": "domain"},
        width=520,
        height=520,
    )


@_drawn
def singular_directions(frame: pd.DataFrame) -> go.Figure:
    """One singular direction, both ends: the tokens that excite it at the left, what is then written at the right.

    Args:
        frame: of ``head.reads(k, direction)``: columns ``end``, ``side``, ``token``, ``value``.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, subplot_titles=("reads", "writes"), horizontal_spacing=0.2)
    for column, side in ((1, "read"), (2, "write")):
        rows = frame[frame["side"] == side]
        rows = pd.concat([rows[rows["end"] == "+"], rows[rows["end"] == "-"][::-1]])
        figure.add_bar(
            row=1,
            col=column,
            orientation="h",
            x=rows["value"],
            y=list(range(len(rows))),
            marker={"color": [_UP if value >= 0 else _DOWN for value in rows["value"]]},
            hovertemplate="%{x:.4g}<extra></extra>",
        )
        figure.update_yaxes(
            row=1,
            col=column,
            autorange="reversed",
            tickmode="array",
            tickvals=list(range(len(rows))),
            ticktext=[_token(token) for token in rows["token"]],
        )
    figure.update_layout(template=template(), title="A singular direction, both ends", height=140 + 20 * len(rows))
    return figure


# -- a prompt ---------------------------------------------------------------------------------------------------------


@_drawn
def attention_pattern(
    pattern: Float[Tensor, "destination source"], tokens: Sequence[str], name: str = "attention"
) -> go.Figure:
    """A pattern (plain or value-weighted), rows looking at columns; the future stays empty."""
    square = pattern.detach().cpu().double()
    if square.shape != (len(tokens), len(tokens)):
        raise CircuitsError(f"a pattern of shape {tuple(square.shape)} does not fit {len(tokens)} tokens")
    future = torch.ones_like(square, dtype=torch.bool).triu(1)
    figure = _heat(square.masked_fill(future, torch.nan).numpy(), title=_plain(name).capitalize(), signed=False)
    texts, places = [_token(token) for token in tokens], list(range(len(tokens)))
    axis = {"tickmode": "array", "tickvals": places, "ticktext": texts, "zeroline": False, "showgrid": False}
    figure.update_traces(hovertemplate="%{y} looks at %{x}<br>%{z:.4g}<extra></extra>")
    side = 300 + 22 * len(tokens)
    figure.update_layout(
        xaxis={**axis, "title": {"text": "source"}, "tickangle": -90},
        yaxis={**axis, "title": {"text": "destination"}, "scaleanchor": "x", "constrain": "domain"},
        width=side,
        height=side - 40,
    )
    return figure


@_drawn
def attribution_map(account: pd.DataFrame) -> go.Figure:
    """What each head moves to the answer, value bias and value path together: a frame of ``trace.ledger(..)``."""
    heads = account[account["component"] == "head"]
    sums = heads.groupby("head", sort=False)["value"].sum()
    places = [_place(label) for label in sums.index]
    frame = pd.DataFrame({"layer": [p[0] for p in places], "index": [p[1] for p in places], "value": sums.to_numpy()})
    figure = head_map(frame, "value")
    return figure.update_layout(title={"text": f"Heads' part in the {_quantity(account)}"})


@_drawn
def waterfall(account: pd.DataFrame, by: str = "kind") -> go.Figure:
    """The closed account as steps that end at the model's own number.

    Args:
        account: of ``trace.ledger(..)``.
        by: ``kind`` sums the whole stream by kind of component; ``layer`` keeps layers apart.
    """
    import plotly.graph_objects as go

    from ov_circuits.report.prompt import COMPONENT_NAMES, components

    if by not in ("kind", "layer"):
        raise CircuitsError(f"an account is shown by 'kind' or by 'layer', not by {by!r}")
    steps: dict[str, float] = {}
    for part in components(account):
        name = COMPONENT_NAMES.get(part["component"], part["component"])
        if by == "layer" and part["layer"] is not None:
            name = (
                f"Layer {part['layer']}: {name[0].lower()}{name[1:]}"
                if name != "MLPs"
                else f"Layer {part['layer']}: MLP"
            )
        steps[name] = steps.get(name, 0.0) + part["value"]
    figure = go.Figure(
        go.Waterfall(
            orientation="h",
            y=[*steps, "sum"],
            x=[*steps.values(), account.attrs["total"]],
            measure=[*["relative"] * len(steps), "total"],
            increasing={"marker": {"color": _UP}},
            decreasing={"marker": {"color": _DOWN}},
            totals={"marker": {"color": _ACCENT}},
            connector={"line": {"width": 1, "color": _RULE}},
            hovertemplate="%{y}: %{delta:+.4g}<extra></extra>",
        )
    )
    residual = f"<br><sup>the model's own {account.attrs['logit']:.5g}, residual {account.attrs['residual']:.1e}</sup>"
    _finish(figure, f"The account of the {_quantity(account)}{residual}", x="running sum", y="")
    return figure.update_layout(yaxis={"autorange": "reversed"}, height=170 + 22 * (len(steps) + 1))


@_drawn
def effects(sweep: pd.DataFrame, named: int = 6) -> go.Figure:
    """Ablation beside attribution: what heads add themselves across, what the answer loses without them up.

    On the dashed line a head's removal costs what its own entry says.

    Args:
        sweep: of :func:`ov_circuits.ablation_sweep`.
        named: how many heads, those of the largest effects, have their names beside them.
    """
    import plotly.graph_objects as go

    x, y, layer = sweep["direct_effect"], sweep["total_effect"], sweep["layer"]
    ends = [min(0.0, float(x.min()), float(y.min())), max(0.0, float(x.max()), float(y.max()))]
    named_heads = set(sweep.loc[(x.abs() + y.abs()).nlargest(named).index, "head"])
    figure = go.Figure(
        go.Scatter(x=ends, y=ends, mode="lines", line={"width": 1, "dash": "dash", "color": _SOFT}, hoverinfo="skip")
    )
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers+text",
        text=[label if label in named_heads else "" for label in sweep["head"]],
        textposition="top center",
        customdata=sweep["head"],
        marker={"size": 9, "line": {"width": 0.75, "color": "#8b857a"}, "color": layer, **_scale(layer, "layer")},
        hovertemplate="head %{customdata}<br>direct %{x:.4g}, total %{y:.4g}<extra></extra>",
    )
    title = f"Ablation beside attribution ({_plain(str(sweep.attrs.get('method', '')))} ablation)"
    return _finish(figure, title, x="direct effect: its own part in the account", y="total effect: lost without it")


@_drawn
def continuation(heads: pd.DataFrame, n: int = 20) -> go.Figure:
    """Which heads chose each token over its runner-up: the ``n`` heads of the largest parts down, steps across.

    Args:
        heads: of ``generation.heads()``.
        n: how many heads.
    """
    grid = heads.pivot(index="head", columns="step", values="value")
    strongest = grid.abs().max(axis=1).nlargest(n).index
    grid = grid.loc[sorted(strongest, key=_place)]
    tokens = heads.drop_duplicates("step").set_index("step")["token"].reindex(grid.columns)
    steps = list(range(len(tokens)))
    figure = _heat(grid.to_numpy(), "Heads' part in each step", x=steps, y=list(range(len(grid))), signed=True)
    figure.update_traces(
        customdata=[[label] * len(steps) for label in grid.index],
        hovertemplate="head %{customdata}, %{x}<br>%{z:+.4g}<extra></extra>",
    )
    texts = [f"{step + 1}: {_token(token)}" for step, token in enumerate(tokens)]
    return figure.update_layout(
        xaxis={"title": {"text": "step and its token"}, "tickmode": "array", "tickvals": steps, "ticktext": texts},
        yaxis={"title": {"text": "head"}, **_ticks(grid.index)},
        height=150 + 22 * len(grid),
    )


# -- many prompts, a text ---------------------------------------------------------------------------------------------


@_drawn
def means(attribution: pd.DataFrame, n: int = 24) -> go.Figure:
    """The ``n`` components of the largest means over a prompt set, heads and others, with their intervals.

    Args:
        attribution: of :func:`ov_circuits.attribute`.
        n: how many components.
    """
    import plotly.graph_objects as go

    from ov_circuits.report.sets import component_name

    rows = attribution.loc[attribution["mean"].abs().nlargest(n).index]
    names = [
        f"head {row['head']}" if row["component"] == "head" else component_name(row) for row in rows.to_dict("records")
    ]
    bars = {"type": "data", "symmetric": False, "array": rows["high"] - rows["mean"], "thickness": 1, "width": 3}
    figure = go.Figure(
        go.Bar(
            orientation="h",
            x=rows["mean"],
            y=list(range(len(rows))),
            customdata=names,
            marker={"color": [_UP if value >= 0 else _DOWN for value in rows["mean"]]},
            error_x={**bars, "arrayminus": rows["mean"] - rows["low"], "color": _INK},
            hovertemplate="%{customdata}: %{x:+.4g}<extra></extra>",
        )
    )
    facts = attribution.attrs
    note = f"<br><sup>{facts['prompts']} prompts; lines are {100 * facts['level']:.0f} % intervals, {facts['interval']}</sup>"
    _finish(figure, f"Means over the prompts of {_plain(str(facts['set']))}{note}", x=_quantity(attribution), y="")
    return figure.update_layout(
        yaxis={"autorange": "reversed", **_ticks(names)}, height=150 + 22 * len(rows), bargap=0.3
    )


@_drawn
def distances(distributions: pd.DataFrame, head: str) -> go.Figure:
    """How far back a head attends in a text: its share of attention by distance.

    Args:
        distributions: of a scan, ``scan.distributions``.
        head: label.

    Raises:
        CircuitsError: the scan does not hold that head.
    """
    import plotly.graph_objects as go

    rows = distributions[(distributions["of"] == "distance") & (distributions["head"] == head)]
    if rows.empty:
        raise CircuitsError(f"the frame has no distances of head {head!r}: scan with this head")
    figure = go.Figure(
        go.Bar(
            x=list(range(len(rows))),
            y=rows["share"],
            marker={"color": _ACCENT},
            hovertemplate="%{y:.1%}<extra></extra>",
        )
    )
    _finish(figure, f"Attention of head {_plain(head)} by distance", x="tokens back", y="share of attention")
    return figure.update_layout(
        xaxis=_ticks(rows["bin"]), yaxis={"tickformat": ".0%", "rangemode": "tozero"}, bargap=0.25
    )


# -- parts ------------------------------------------------------------------------------------------------------------


@checked
def save(figure: go.Figure, file: str | os.PathLike[str]) -> None:
    """Write a figure: a picture as it would be on the page of a paper, or a page of its own.

    Pictures are drawn by a Chromium on the PATH, or by kaleido where it is installed; the same figure gives the same bytes.

    Args:
        figure: any plotly figure; its layout's width and height, in pixels, count (900 by 480 by default).
        file: what to write: ``.svg``, ``.png`` (two pixels for each of the layout's) or ``.html`` (with plotly.js inside).

    Raises:
        CircuitsError: another ending, nothing here that draws, or a file that cannot be written.
    """
    from pathlib import Path

    from ov_circuits.files import atomic_path
    from ov_circuits.report.stills import stills

    ending = Path(file).suffix.lower()
    if ending not in (".svg", ".png", ".html"):
        raise CircuitsError(f"a figure is written as .svg, .png or .html, not as {str(file)!r}")
    with atomic_path(file) as temporary:
        if ending == ".html":
            temporary.write_text(figure.to_html(), encoding="utf-8")
        else:
            temporary.write_bytes(stills({"figure": figure})[f"figure{ending}"])


def _heat(
    grid: Any, title: str, x: list[Any] | None = None, y: list[Any] | None = None, signed: bool | None = None
) -> go.Figure:
    import numpy as np
    import plotly.graph_objects as go

    known = grid[np.isfinite(grid)]
    signed = bool((known < 0).any()) if signed is None else signed
    reach = float(np.abs(known).max(initial=0.0)) or 1.0
    limits = (
        {"zmin": -reach, "zmax": reach} if signed else {"zmin": min(0.0, float(known.min(initial=0.0))), "zmax": reach}
    )
    figure = go.Figure(go.Heatmap(z=grid, x=x, y=y, colorscale=DIVERGING if signed else SEQUENTIAL, **limits))
    _finish(figure, title, x="", y="")
    return figure.update_layout(
        xaxis={"showgrid": False, "zeroline": False},
        yaxis={"autorange": "reversed", "showgrid": False, "zeroline": False},
    )


def _ticks(names: Iterable[str]) -> dict[str, Any]:
    """Names at 0, 1, 2, ..; as categories plotly would take labels such as 1.10 for numbers."""
    texts = [_plain(name) for name in names]
    return {"tickmode": "array", "tickvals": list(range(len(texts))), "ticktext": texts}


def _scale(values: pd.Series, title: str) -> dict[str, Any]:
    """Colours of markers: centred on zero where there are negative values."""
    bar = {"thickness": 10, "outlinewidth": 0, "title": {"text": title, "side": "right"}}
    if float(values.min()) < 0:
        reach = float(values.abs().max())
        return {"colorscale": DIVERGING, "cmin": -reach, "cmax": reach, "colorbar": bar, "showscale": True}
    return {"colorscale": SEQUENTIAL, "colorbar": bar, "showscale": True}


def _finish(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    return figure.update_layout(
        template=template(), title={"text": title}, xaxis={"title": {"text": x}}, yaxis={"title": {"text": y}}
    )


def _numbers(frame: pd.DataFrame, name: str) -> str:
    """The name of a column of numbers."""
    if name not in frame:
        raise CircuitsError(f"the frame has no column {name!r}: it has {', '.join(map(str, frame.columns))}")
    if not pd.api.types.is_numeric_dtype(frame[name]):
        raise CircuitsError(
            f"column {name!r} holds no numbers: draw one of {', '.join(map(str, frame.select_dtypes('number')))}"
        )
    return name


def _label(score: str) -> str:
    """A score's name on pages, where it is one of the board's."""
    from ov_circuits.scores.board import all_scores

    known = all_scores().get(score)
    return _plain(known.label if known else score.replace("_", " "))


def _place(label: str) -> tuple[int, int]:
    layer, head = label.split(".")
    return int(layer), int(head)


def _quantity(account: pd.DataFrame) -> str:
    return _plain(visible(account.attrs["quantity"]).replace("·", " "))


def _token(token: str) -> str:
    return _plain(visible(token))


def _plain(text: str) -> str:
    """Plotly takes ``<b>``, ``<br>`` and entities in labels for markup: this is the only road of text into a figure."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
