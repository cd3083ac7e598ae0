"""What a notebook shows for a head, a trace, a continuation, a scan, a claim's finding, a certificate and a scoreboard: static
HTML, so that it looks the same in JupyterLab, VS Code and Colab, in exports, and with scripts disabled.

Nothing has an id and every class begins with ``ov-``, so that outputs do not collide; colours are the notebook's own, light or
dark, and no more than that is taken from its own style of tables (which is why some rules are important). Text is escaped in one
place, :func:`_e`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ov_circuits.report.text import visible
from ov_circuits.shown import counted

if TYPE_CHECKING:
    from ov_circuits.certificate import Certificate
    from ov_circuits.claims import Finding
    from ov_circuits.model import Head
    from ov_circuits.trace.generation import Generation
    from ov_circuits.trace.scan import Scan
    from ov_circuits.trace.trace import Trace

_STYLE = """<style>
.ov-box{font:14px/1.5 system-ui,sans-serif;max-width:1100px}
.ov-box p{margin:.4em 0;max-width:80ch}
.ov-box .ov-title{font-weight:650;font-size:16px;margin:0}
.ov-box .ov-soft{opacity:.72}
.ov-box .ov-token{font:.88em ui-monospace,monospace;border:1px solid rgba(128,128,128,.5);border-radius:3px;padding:0 3px}
.ov-box .ov-token{white-space:pre;unicode-bidi:isolate}
.ov-box table{border-collapse:collapse;margin:.5em 0;font-size:13px}
.ov-box tr{background:none!important}
.ov-box th,.ov-box td{text-align:left!important;padding:2px 12px 2px 0;background:none;vertical-align:top}
.ov-box th,.ov-box td{border:0;border-top:1px solid rgba(128,128,128,.3)}
.ov-box thead th{border:0;font-weight:500;opacity:.72;vertical-align:bottom}
.ov-box .ov-num{text-align:right!important;font-variant-numeric:tabular-nums;white-space:nowrap}
.ov-box .ov-map td,.ov-box .ov-map th{padding:0 4px;border:1px solid transparent;font-size:11px;min-width:30px}
.ov-box .ov-map td,.ov-box .ov-map th{text-align:center!important}
.ov-box .ov-row{display:flex;flex-wrap:wrap;gap:8px 40px}
.ov-box .ov-row figure{width:min-content}.ov-box .ov-row svg{max-width:none!important}
.ov-box .ov-scroll{overflow-x:auto}.ov-box .ov-scroll td{white-space:nowrap}
.ov-box .ov-words{display:inline-block;min-width:24ch}
.ov-box figure{margin:.5em 0}.ov-box figcaption{font-size:12.5px;opacity:.72}
</style>"""
# Columns of frames that hold a token's text, where they hold text.
_TOKEN_TEXTS = (
    "token",
    "source",
    "output",
    "query",
    "key",
    "destination",
    "next",
    "text",
    "runner_up_text",
    "source_text",
)
_BLUE, _ORANGE, _TEAL = "#2f6db3", "#c26c1c", "#0b6764"
_ROWS = 30
_MAP_WIDTH = 64


def head_html(head: Head) -> str:
    """A head: its sentence, spectrum, eigenvalues, directions and scores."""
    from ov_circuits.report.cards import Texts, layer_cards, spectrum_draws
    from ov_circuits.report.evidence import sentence
    from ov_circuits.scores.board import SCORES, head_scores

    model = head.model
    title = f"Head {head.label} of {_e(model.name)}"
    group = f"key/value head {head.kv_head}, " if model.architecture.group_size > 1 else ""
    facts = f"{group}view {model.view}, d_head {model.architecture.d_head}"
    if not bool(model.layer(head.layer).finite_heads[head.index]):
        return _box(title, facts, "<p>Its weights hold NaN or infinity: it has no spectrum and no scores.</p>")
    texts = Texts(model)
    card = layer_cards(model, head.layer, texts, spectrum_draws(model, 0), {})[head.index]
    row = head_scores(head)
    parts = [
        part if isinstance(part, str) else _token(texts.table[part["token"]])
        for part in (_escaped(part) for part in sentence(row, card, None, None))
    ]
    full = card["eigenvalues_full"]
    pictures = [
        _figure(*_spectrum_svg(card)),
        _figure(*_plane_svg(card["eigenvalues_ov"], "residual space")),
        *([_figure(*_plane_svg(full, "vocabulary"))] if full else []),
    ]
    scores = [
        (_e(score.label), _number(row[key]), _number(row.get(f"{key}_z"), "+.2g"))
        for key, score in SCORES.items()
        if key in row
    ]
    return _box(
        title,
        facts,
        f"<p>{''.join(parts)}</p>",
        f'<div class="ov-row">{"".join(pictures)}</div>',
        _directions_table(card, texts.table),
        _table(("Score", "value", "z"), scores, numbers=(1, 2)),
    )


def trace_html(trace: Trace) -> str:
    """A prompt: its tokens, what the model expects next, and the heads that write most at its end."""
    model = trace.model
    bos = "a beginning-of-text token was put in front" if trace.bos_added else "no token was added"
    likely = trace.record.logits[-1].double().softmax(-1).topk(min(5, trace.record.logits.shape[-1]))
    from ov_circuits.words import token_list

    following = " ".join(
        f"{_token(text)} {100 * share:.3g} %"
        for text, share in zip(token_list(model, likely.indices.tolist()), likely.values.tolist(), strict=True)
    )
    norms = trace.write_norms()[..., -1].flatten()
    rows = []
    for place in norms.topk(min(8, norms.numel())).indices.tolist():
        label = model.head_labels[place]
        attention = trace.pattern(label)[-1]
        source = int(attention.argmax())
        seen = f"{_token(trace.texts[source])} at {source} ({float(attention[source]):.2f})"
        rows.append((label, _number(float(norms[place])), seen))
    return _box(
        f"A prompt through {_e(model.name)}",
        f"{counted(len(trace), 'token')}; {bos}",
        f"<p>{' '.join(_token(text) for text in trace.texts)}</p>",
        f"<p>Likeliest next: {following}</p>",
        _table(("Head", "write norm at the end", "looks most at"), rows, numbers=(1,)),
        '<p class="ov-soft">trace.ledger(answer, against) accounts for a logit; ov.dashboard(model, trace) shows all of it.</p>',
    )


def generation_html(generation: Generation) -> str:
    """A continuation: each step's token beside its runner-up, and the heads that made most of the difference."""
    trace = generation.trace
    by_step = generation.heads().groupby("step")
    rows = []
    for number, step in enumerate(generation.steps):
        heads = by_step.get_group(number).set_index("head")["value"]
        most = heads.loc[heads.abs().nlargest(3).index]
        said = ((step.text, step.probability), (step.runner_up_text, step.runner_up_probability))
        chosen = [f"{_token(text)} {_number(share)}" for text, share in said]
        told = ", ".join(f"{label} {_number(value, '+.2g')}" for label, value in most.items())
        rows.append((str(number + 1), *chosen, _number(step.account.reading.actual, "+.3g"), told))
    how = "the model's likeliest tokens" if generation.greedy else "tokens that were given"
    return _box(
        f"A continuation by {_e(trace.model.name)}",
        f"{counted(len(generation.steps), 'step')}, {how}; {counted(generation.start, 'token')} of prompt",
        f"<p>{' '.join(_token(text) for text in trace.texts)}</p>",
        _table(("Step", "chosen", "runner-up", "logit difference", "strongest heads"), rows, numbers=(3,)),
        '<p class="ov-soft">ov.dashboard(model, generation=...) shows each step over the tokens.</p>',
    )


def scan_html(scan: Scan) -> str:
    """A scan: its heads by the loss that they save, each with its strongest example."""
    facts = scan.facts
    strongest = scan.examples[(scan.examples["measure"] == "write") & (scan.examples["rank"] == 1)]
    examples = strongest[strongest["kind"] == "strongest"].set_index("head")
    rows = []
    for row in scan.heads.nlargest(_ROWS, "loss_saved").to_dict("records"):
        example = examples.loc[row["head"]]
        text = f"{_prose(example['before'])}{_token(example['destination'])}{_prose(example['after'])}"
        values = (_number(row["loss_saved"], "+.3g"), _number(row["write"]), _token(example["source"]), _words(text))
        rows.append((row["head"], *values))
    return _box(
        f"{_e(facts['model'])} over {_e(facts['corpus'])}",
        f"{counted(facts['positions'], 'position')}, {counted(len(scan.heads), 'head')}; loss {_number(facts['loss'])} nats",
        _table(("Head", "loss saved", "write", "source", "where it writes most"), rows, numbers=(1, 2)),
        '<p class="ov-soft">scan.of(head) has a head\'s examples; ov.dashboard(model, scan=scan) shows all of it.</p>',
    )


def finding_html(finding: Finding) -> str:
    """What came of a claim: the verdict, why, and each number beside the other heads'."""
    rows = [
        (
            f"{effect.name}{', decides' if effect.decides else ''}",
            _number(effect.value, "+.3g"),
            f"{_number(effect.low, '+.3g')} to {_number(effect.high, '+.3g')}",
            _number(effect.others, "+.3g"),
            f"{_number(effect.difference_low, '+.3g')} to {_number(effect.difference_high, '+.3g')}",
            _words(_e(effect.what)),
        )
        for effect in finding.effects
    ]
    header = ("Effect", "the head", "95 % over prompts", "other heads", "95 % of the difference", "what it is")
    others = f", beside {', '.join(finding.others)}" if finding.others else ""
    return _box(
        f"{_e(finding.claim)}: {finding.verdict}",
        f"{_e(finding.model)}, {finding.prompts} prompts{_e(others)}",
        f"<p>{_e(finding.reason)}</p>",
        _table(header, rows, numbers=range(1, 5)) if rows else "",
    )


def tokens_html(frame: pd.DataFrame) -> str | None:
    """pandas' own table of a frame, with marks for what does not show of its tokens."""
    plain = pd.DataFrame(frame)
    if plain.columns.is_unique:
        texts = [name for name in _TOKEN_TEXTS if name in plain and pd.api.types.is_string_dtype(plain[name])]
        plain = plain.assign(**{name: plain[name].map(visible, na_action="ignore") for name in texts})
    shown: str | None = plain._repr_html_()  # type: ignore[operator]
    return shown


def certificate_html(certificate: Certificate) -> str:
    """The checks of a checkpoint, each with the largest error found beside its limit."""
    said = {True: "passed", False: "failed", None: "not possible"}
    rows = [
        (said[check.passed], _e(check.name), _number(check.value), _number(check.limit), _words(_e(check.detail)))
        for check in certificate.checks
    ]
    header = ("", "check", "error", "limit", "on what")
    return _box(_e(certificate.model), certificate.summary, _table(header, rows, numbers=(2, 3)))


def board_html(board: pd.DataFrame) -> str | None:
    """A scoreboard: the map of its first score, and its rows; None where the frame is no longer one."""
    from ov_circuits.scores.board import TOKEN_COLUMNS, all_scores

    known = all_scores()
    keys = [key for key in board.columns if key in known]
    if not keys or board.empty or not {"head", "layer", "index"} <= set(board.columns) or not board.columns.is_unique:
        return None
    shown = board if len(board) <= _ROWS else board.head(_ROWS)
    tokens = [name for name in TOKEN_COLUMNS[:2] if name in board]
    rows = [
        (
            _e(str(row["head"])),
            *(_with_z(row.get(key), row.get(f"{key}_z")) for key in keys),
            *(" ".join(_token(text) for text in row[name]) for name in tokens),
        )
        for row in shown.to_dict("records")
    ]
    header = ("Head", *(known[key].label for key in keys), *(name.split("_")[0] for name in tokens))
    left = "" if len(shown) == len(board) else f'<p class="ov-soft">The first {len(shown)} of {len(board)} rows.</p>'
    view = board.attrs.get("view")
    facts = counted(len(board), "head") + (f", view {_e(str(view))}" if view else "")
    return _box(
        f"Scores of {_e(str(board.attrs.get('model', 'heads')))}",
        facts,
        _map_table(board, keys[0], known[keys[0]].label),
        f'<div class="ov-scroll">{_table(header, rows, numbers=range(1, 1 + len(keys)))}</div>',
        left,
    )


# -- parts ------------------------------------------------------------------------------------------------------------


def _box(title: str, facts: str, *parts: str) -> str:
    return f'<div class="ov-box">{_STYLE}<p class="ov-title">{title}</p><p class="ov-soft">{facts}</p>{"".join(parts)}</div>'


def _e(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), quote=True)


def _escaped(part: Any) -> Any:
    return _e(part) if isinstance(part, str) else part


def _token(text: str) -> str:
    return f'<bdi class="ov-token" dir="ltr">{html.escape(visible(text), quote=True)}</bdi>'


def _prose(text: str) -> str:
    """Running text: its spaces stay spaces."""
    return (
        f'<bdi dir="ltr">{html.escape(" ".join(part and visible(part) for part in text.split(" ")), quote=True)}</bdi>'
    )


def _number(value: Any, digits: str = ".3g") -> str:
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    return format(float(value), digits).replace("-", "\N{MINUS SIGN}")


def _with_z(value: Any, z: Any) -> str:
    if z is None or not math.isfinite(z):
        return _number(value)
    return f'{_number(value)} <span class="ov-soft">z {_number(z, "+.2g")}</span>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Rows are HTML already; the header is text."""
    right = set(numbers)
    kind = [' class="ov-num"' if i in right else "" for i in range(len(header))]
    head = "".join(f'<th scope="col"{kind[i]}>{_e(name)}</th>' for i, name in enumerate(header))
    body = "".join(
        "<tr>" + "".join(f"<td{kind[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _words(html: str) -> str:
    """A cell of words: on a narrow screen the table scrolls rather than break it a word a line."""
    return f'<span class="ov-words">{html}</span>'


def _directions_table(card: dict[str, Any], table: list[str]) -> str:
    rows = []
    for k, direction in enumerate(card["directions"] or []):
        share = f"{k}: {_number(direction['value'])}, {100 * direction['energy']:.0f} %".replace(
            " ", "\N{NO-BREAK SPACE}"
        )
        flag = "" if direction["separable"] else '<br><span class="ov-soft">not separable: read the span</span>'
        for end, sign in (("plus", "+"), ("minus", "\N{MINUS SIGN}")):
            sides = [" ".join(_token(table[int(t)]) for t, _ in direction[side][end]) for side in ("reads", "writes")]
            rows.append((share + flag if end == "plus" else "", sign, *sides))
    return _table(("Direction", "end", "reads", "writes"), rows) if rows else ""


def _figure(caption: str, svg: str) -> str:
    """Notebooks that are not trusted leave pictures out: a caption says in numbers what its picture shows."""
    return f"<figure><figcaption>{_e(caption)}</figcaption>{svg}</figure>"


def _spectrum_svg(card: dict[str, Any], width: int = 320, height: int = 150) -> tuple[str, str]:
    values, low, high = card["singular_values"], card["null_low"], card["null_high"]
    top = max([*values, *high]) or 1.0
    step = width / len(values)

    def y(value: float) -> float:
        return round(height - height * value / top, 1)

    bars = "".join(
        f'<rect x="{k * step:.1f}" y="{y(v)}" width="{0.75 * step:.1f}" height="{height - y(v):.1f}" fill="{_TEAL}"/>'
        for k, v in enumerate(values)
    )
    middle = [f"{(k + 0.37) * step:.1f}" for k in range(len(values))]
    edge = [f"{x},{y(v)}" for x, v in zip(middle, high, strict=True)]
    edge += [f"{x},{y(v)}" for x, v in zip(reversed(middle), reversed(low), strict=True)]
    label = f"{len(values)} singular values from {_number(values[0])} to {_number(values[-1])}"
    return f"{label}; grey: range by chance", (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'{bars}<polygon points="{" ".join(edge)}" fill="gray" fill-opacity="0.35" stroke="gray"/></svg>'
    )


def _plane_svg(points: list[list[float]], space: str, size: int = 150) -> tuple[str, str]:
    reach = 1.1 * max(1e-12, *(math.hypot(*point) for point in points))
    half = size / 2

    def dot(real: float, imaginary: float) -> str:
        colour = _ORANGE if real >= 0 else _BLUE
        return f'<circle cx="{half + half * real / reach:.1f}" cy="{half - half * imaginary / reach:.1f}" r="3" fill="{colour}"/>'

    axes = f'<path d="M0 {half}H{size}M{half} 0V{size}" stroke="gray" stroke-opacity="0.5"/>'
    label = f"{len(points)} eigenvalues, {space}, sizes up to {_number(reach / 1.1)}"
    dots = "".join(dot(*point) for point in points)
    return label, f'<svg width="{size}" height="{size}" role="img" aria-label="{label}">{axes}{dots}</svg>'


def _map_table(board: pd.DataFrame, key: str, label: str) -> str:
    """Layers down, heads across; nothing where the frame no longer holds every head once."""
    n_layers, n_heads = int(board["layer"].max()) + 1, int(board["index"].max()) + 1
    if len(board) != n_layers * n_heads or board.duplicated(["layer", "index"]).any() or n_heads > _MAP_WIDTH:
        return ""
    grid = board.pivot(index="layer", columns="index", values=key).to_numpy(dtype=float)
    reach = float(np.nanmax(np.abs(grid))) if np.isfinite(grid).any() else 1.0
    columns = "".join(f"<th>{k}</th>" for k in range(n_heads))
    rows = "".join(
        f"<tr><th>{layer}</th>{''.join(_cell(v, reach or 1.0) for v in row)}</tr>" for layer, row in enumerate(grid)
    )
    table = f'<table class="ov-map"><thead><tr><td></td>{columns}</tr></thead><tbody>{rows}</tbody></table>'
    caption = f"<figcaption>{_e(label)}: layers down, heads across</figcaption>"
    return f'<figure class="ov-scroll">{caption}{table}</figure>'


def _cell(value: float, reach: float) -> str:
    if not math.isfinite(value):
        return "<td>\N{EN DASH}</td>"
    colour, ink = _colour(value / reach)
    return f'<td style="background:{colour};color:{ink}">{_number(value, ".2f")}</td>'


def _colour(share: float) -> tuple[str, str]:
    """The diverging map at a share between -1 and 1, and the ink (black or white) that reads best on it."""
    from ov_circuits.report.figures import DIVERGING

    stops = [[int(str(hexed)[i : i + 2], 16) for i in (1, 3, 5)] for _, hexed in DIVERGING]
    at = (min(1.0, max(-1.0, share)) + 1) / 2 * (len(stops) - 1)
    low = min(len(stops) - 2, int(at))
    rgb = [round(a + (b - a) * (at - low)) for a, b in zip(stops[low], stops[low + 1], strict=True)]
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return f"rgb({rgb[0]},{rgb[1]},{rgb[2]})", "#fff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000"
