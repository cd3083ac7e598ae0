"""What the commands print: results to standard output, words on what is going on to standard error."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ov_circuits.errors import CircuitsError
from ov_circuits.processes import is_first
from ov_circuits.shown import counted

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, JustifyMethod

    from ov_circuits.certificate import Certificate
    from ov_circuits.checkpoint.census import Census
    from ov_circuits.checkpoint.layout import Architecture
    from ov_circuits.claims import Finding
    from ov_circuits.model import Head, Model
    from ov_circuits.trace.generation import Generation
    from ov_circuits.trace.scan import Scan
    from ov_circuits.trace.trace import Trace

# What fits on a terminal; a file or --json gets every column.
_SHOWN_SCORES = (
    "eigen_copying_full",
    "eigen_copying_full_z",
    "eigen_copying_ov",
    "ov_frobenius_norm",
    "ov_stable_rank",
)
_PATH_NUMBERS = ("value", "null_mean", "z", "z_paired")
_SHOWN_TOKENS = 3
_NAMED = 4  # scores of which the same is said; more are counted
_PIPE_WIDTH = 160


def checkpoint_facts(label: str, found: Census, stored: Model | None) -> dict[str, Any]:
    """What ``inspect`` knows, ready for JSON."""
    a = found.architecture
    shapes: dict[str, list[int]] = {
        "W_Q": [a.n_heads, a.d_model, a.d_head],
        "W_K": [a.n_kv_heads, a.d_model, a.d_head],
        "W_V": [a.n_kv_heads, a.d_model, a.d_head],
        "W_O": [a.n_heads, a.d_head, a.d_model],
    }
    for role in found.biases:
        shapes[f"b_{role}"] = [a.d_model] if role == "O" else [shapes[f"W_{role}"][0], a.d_head]
    facts: dict[str, Any] = {
        "model": label,
        "family": a.family,
        "layers": a.n_layers,
        "heads": a.n_heads,
        "kv_heads": a.n_kv_heads,
        "heads_per_kv_head": a.group_size,
        "d_model": a.d_model,
        "d_head": a.d_head,
        "d_mlp": a.d_mlp,
        "vocabulary": a.n_vocab,
        "context": a.n_ctx,
        "norm": a.norm,
        "norm_eps": a.norm_eps,
        "positions": _positions(a),
        "attention": _peculiarities(a),
        "tied_unembedding": a.tied,
        "shapes": shapes,
        "parameters": found.n_parameters,
        "W_O": {
            "per_layer": found.output_per_layer,
            "all_layers": found.output_total,
            "percent_of_model": 100 * found.output_share,
        },
    }
    if stored is None:
        return facts | {"holds": "a config alone, no weights"}
    return facts | {"holds": _holdings(stored), "default_view": stored.view}


def _positions(a: Architecture) -> str:
    """``rotary, theta 10000`` and whatever else is to be known of positions."""
    turned = [rotary for rotary in a.rotary if rotary is not None]
    if not turned:
        return a.positions
    bases = ", ".join(f"{theta:g}" for theta in dict.fromkeys(rotary.theta for rotary in turned))
    kinds = ", ".join(dict.fromkeys(rotary.kind for rotary in turned if rotary.kind != "default"))
    parts = [f"rotary, theta {bases}", *([f"rescaled ({kinds})"] if kinds else [])]
    if turned[0].dim < a.d_head:
        parts.append(f"on {turned[0].dim} of {a.d_head} coordinates")
    if turned[0].interleaved:
        parts.append("pairs are neighbours")
    if len(turned) < a.n_layers:
        parts.append(f"none in {counted(a.n_layers - len(turned), 'layer')}")
    return ", ".join(parts)


def _peculiarities(a: Architecture) -> list[str]:
    """What this family's attention does beyond softmax(q k) v."""
    windows = [window for window in a.windows if window is not None]
    sizes = ", ".join(map(str, dict.fromkeys(windows)))
    found = [
        ("beside the MLP, not before it", a.parallel),
        (f"a window of {sizes} in {len(windows)} of {a.n_layers} layers", bool(windows)),
        ("queries and keys are normalised", a.qk_norm is not None),
        (f"scores are capped at {a.attention_softcap}", a.attention_softcap is not None),
        (f"queries, keys and values are clamped to {a.qkv_clip}", a.qkv_clip is not None),
        (f"logits are multiplied by {a.logit_scale:g}", a.logit_scale != 1),
        (f"logits are capped at {a.logit_softcap}", a.logit_softcap is not None),
    ]
    return [text for text, holds in found if holds]


def _holdings(model: Model) -> str:
    source = model.source
    dtypes = " and ".join(sorted({source.store.dtype(name) for name in source.store.names()}))
    missing = source.contents.missing
    if not missing:
        return f"all tensors, stored as {dtypes}"
    return f"{source.store.n_parameters:,} numbers, stored as {dtypes}; {len(missing)} tensors are absent ({missing[0]}, ..)"


def cost_facts(found: Census, stored: Model | None, gflops: float | None) -> dict[str, Any]:
    """What the scoreboard of a model will cost on this machine (or on one of so many GFLOP/s a core)."""
    import torch

    from ov_circuits.folding import default_view
    from ov_circuits.scores.plan import Plan, machine_rate, plan_facts

    view = default_view(found.architecture) if stored is None else stored.view
    plan = Plan(found.architecture, view, embeddings=stored is None or stored.source.contents.embeddings)
    return plan_facts(plan, machine_rate() if gflops is None else gflops * 1e9, torch.get_num_threads())


def print_plan(facts: dict[str, Any]) -> None:
    """What :func:`cost_facts` found."""
    together = facts["all_spectra_together"]
    parts = facts["scores"] | facts["over_vocabulary"] | {"all spectra together": together}
    rows = [
        (
            name,
            f"{cost['once']:.2g}",
            f"{cost['per_head']:.2g}",
            f"{cost['operations']:.3g}",
            _time(cost["cpu_seconds"]),
        )
        for name, cost in parts.items()
    ]
    rate = f"{facts['gflops_per_core']:.0f} GFLOP/s a core in float64"
    title = f"Plan: {counted(facts['heads'], 'head')}, view {facts['view']}, {rate}"
    _print_table(title, ("score", "once", "a head", "operations", "one core"), rows, "lrrrr")
    memory = facts["memory"]
    lines = (
        f"All spectra on {counted(facts['threads'], 'thread')}: {_time(together['seconds'])}.",
        f"Memory above the imports: {memory['peak'] / 1e9:.2f} GB = {memory['held'] / 1e9:.2f} held + "
        f"{memory['work'] / 1e9:.2f} at work. {facts['memory_formula']}.",
    )
    for line in lines:
        stdout().print(line, highlight=False, markup=False)


def _time(seconds: int | float) -> str:
    """In the unit that reads best."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def print_checkpoint(facts: dict[str, Any]) -> None:
    """What :func:`checkpoint_facts` found."""
    output = facts["W_O"]
    heads = f"{facts['heads']} a layer"
    if facts["heads_per_kv_head"] > 1:
        heads += f" on {facts['kv_heads']} key/value heads ({facts['heads_per_kv_head']} share one)"
    rows = [
        ("family", facts["family"]),
        ("layers", str(facts["layers"])),
        ("heads", heads),
        ("d_model, d_head, d_mlp", f"{facts['d_model']}, {facts['d_head']}, {facts['d_mlp']}"),
        ("vocabulary", f"{facts['vocabulary']:,}, unembedding {'tied' if facts['tied_unembedding'] else 'of its own'}"),
        ("context", f"{counted(facts['context'], 'position')} ({facts['positions']})"),
        ("norm", f"{facts['norm']}, eps {facts['norm_eps']:.3g}"),
        *([("attention", "; ".join(facts["attention"]))] if facts["attention"] else []),
        *((name, f"{shape}") for name, shape in facts["shapes"].items()),
        ("parameters", f"{facts['parameters']:,} ({_short(facts['parameters'])})"),
        (
            "W_O",
            f"{_short(output['per_layer'])} a layer, {_short(output['all_layers'])} in all layers, "
            f"{output['percent_of_model']:.1f} % of the model",
        ),
        ("holds", facts["holds"]),
    ]
    if "default_view" in facts:
        rows.append(("view", f"{facts['default_view']} unless --view says otherwise"))
    _print_table(facts["model"], None, rows, "ll")


def sort_column(key: str, model: Model) -> str:
    """The column that ``--sort`` means; underscores may be written as spaces, as in the table's headings.

    Raises:
        CircuitsError: there is no such column, or this checkpoint does not allow it.
    """
    from ov_circuits.evidence import columns
    from ov_circuits.scores.board import SCORES, all_scores
    from ov_circuits.trace.behaviours import BEHAVIOURS

    column, known = key.strip().replace(" ", "_"), columns()
    if score_of(column) not in known and column not in ("layer", "index", "kv_head"):
        near = difflib.get_close_matches(column, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CircuitsError(
            f"cannot sort by {key!r}: {hint}choose a score ({', '.join(SCORES)}, one over the vocabulary, or a behaviour: "
            f"{', '.join(BEHAVIOURS)}), its _z or _null_mean, layer, index or kv_head"
        )
    score = all_scores().get(score_of(column))  # a behaviour that cannot be had says so itself, when it is measured
    if score is not None and score.needs_embeddings and not model.has_embeddings:
        raise CircuitsError(f"cannot sort by {key!r}: {model.why_no_vocabulary}")
    return column


def score_of(column: str) -> str:
    """The score or behaviour that a column is of: without ``_z``, ``_null_mean`` or ``_spread``."""
    for suffix in ("_z", "_null_mean", "_spread"):
        column = column.removesuffix(suffix)
    return column


def sort_heads(frame: pd.DataFrame, column: str | None, ascending: bool) -> pd.DataFrame:
    """Rows by a column, undefined scores last; as they are without one."""
    if column is None:
        return frame
    if column not in frame:
        raise CircuitsError(
            f"cannot sort by {column!r}: {frame.attrs['left_out'].get(score_of(column), 'it was not computed')}"
        )
    return frame.sort_values(column, ascending=ascending, kind="stable", na_position="last")


def print_heads(frame: pd.DataFrame, model: Model, names: Sequence[str] | None, sort: str | None) -> None:
    """The scoreboard: the scores that were asked for, or the few that fit, and the one it is sorted by."""
    asked = _SHOWN_SCORES if names is None else [column for name in names for column in (name, f"{name}_z")]
    shown = [name for name in asked if name in frame.columns]
    if sort is not None and sort not in (*shown, "head", "layer", "index", "kv_head"):
        shown.append(sort)
    token_columns = [name for name in ("reads_plus", "writes_plus") if name in frame.columns and names is None]
    rows = [
        (
            str(row["head"]),
            *(_number(row[name]) for name in shown),
            *(_tokens(row[name][:_SHOWN_TOKENS]) for name in token_columns),
        )
        for row in frame.to_dict("records")
    ]
    # Spaces for underscores: a narrow terminal folds at words.
    titles = [name.replace("_", " ") for name in ("head", *shown, *token_columns)]
    ranks = any(name.startswith(("rank_copying", "rank_suppression")) for name in shown)
    source = f", source embedding {frame.attrs['source_embedding']} of ranks" if ranks else ""
    _print_table(f"{model.name}, view {model.view}{source}", titles, rows, "l" + "r" * len(shown))
    _say_first(len(frame), model, sort)
    _say_what_scores_are(frame, names)
    hidden = [key for key in frame.attrs["sources"] if key not in shown]
    if hidden and names is None:
        note(
            f"{len(hidden)} more scores, each with its null and z: --json or -o. Those over the vocabulary: --scores all"
        )


def _say_what_scores_are(frame: pd.DataFrame, names: Sequence[str] | None) -> None:
    """Where the named scores come from, which weights are not finite, and what was left out and why."""
    sources = frame.attrs["sources"]
    _note_each({name: sources[name] for name in names or () if name in sources})
    for sentence in frame.attrs["notes"]:
        note(sentence)
    _note_each(frame.attrs["left_out"], "left out ")


def _note_each(said: Mapping[str, str], before: str = "") -> None:
    """What is said of scores, once for all of which the same is said."""
    alike: dict[str, list[str]] = {}
    for key, sentence in said.items():
        alike.setdefault(sentence, []).append(key)
    for sentence, keys in alike.items():
        shown = ", ".join(keys) if len(keys) <= _NAMED else f"{len(keys)} scores, {keys[0]} among them"
        note(f"{before}{shown}: {sentence}")


def print_behaviours(frame: pd.DataFrame, model: Model, sort: str | None) -> None:
    """What heads attend to on probes; a file or --json has spread and null beside each number."""
    keys = list(frame.attrs["sources"])
    shown = keys + ([sort] if sort is not None and sort not in (*keys, "layer", "index") else [])
    rows = [(row["head"], *(_number(row[name], 3) for name in shown)) for row in frame.to_dict("records")]
    seeds = counted(len(frame.attrs["seeds"]), "seed")
    title = f"{model.name}: {frame.attrs['starts_with']}, then {frame.attrs['probe']}; {seeds}"
    _print_table(title, [name.replace("_", " ") for name in ("head", *shown)], rows, "l" + "r" * len(shown))
    _say_first(len(frame), model, sort)
    copying = "; random copying is from -1 to 1, by chance near -1" if "random_copying" in keys else ""
    note(f"means over destinations{copying}; spread over seeds, null mean and z of each: --json or -o")
    for key, why in frame.attrs["left_out"].items():
        note(f"no {key}: {why}")


def print_attribution(frame: pd.DataFrame, top: int) -> None:
    """A set of prompts: the mean difference and its account by component, and the heads with the largest means."""
    attrs = frame.attrs
    say = partial(stdout().print, markup=False, highlight=False)
    dropped = "".join(f", {n} left out {why}" for why, n in attrs["dropped"].items())
    say(f"{attrs['model']} on {attrs['set']}: {counted(attrs['prompts'], 'prompt')}{dropped}")
    say(
        f"{attrs['quantity']}: mean {attrs['difference']:.4f} ({_number(attrs['difference_low'], 4)} to "
        f"{_number(attrs['difference_high'], 4)}), above zero in {attrs['share_right']:.0%}; "
        f"account {attrs['total']:.4f}, largest residual {attrs['largest_residual']:.1e}",
        style="bold",
    )
    kinds = frame.groupby("component", sort=False)["mean"].agg(["size", "sum"])
    rows: list[tuple[str, ...]]
    rows = [(str(component), str(size), f"{total:+.4f}") for component, size, total in kinds.itertuples()]
    _print_table("Components", ("component", "entries", "mean"), rows, "lrr")
    roles = [f"from_{role}" for role in (*attrs["roles"], "other")]
    heads = frame[frame["component"] == "head"].sort_values("mean", key=abs, ascending=False).head(top)
    rows = [
        (str(row["head"]), *(_signed(row[name]) for name in ("mean", "low", "high", "value_bias", *roles)))
        for row in heads.to_dict("records")
    ]
    titles = ("head", "mean", "low", "high", "value bias", *(role.replace("_", " ") for role in roles))
    _print_table(f"Strongest heads, {attrs['level']:.0%} intervals over prompts", titles, rows, "l" + "r" * len(titles))
    note("from ..: the value path by source token. A direct effect only: removing a head may change less.")


def print_paths(frame: pd.DataFrame, model: Model, of: int) -> None:
    """The strongest pairs of heads, of so many."""
    rows = [
        (row["sender"], row["receiver"], row["kind"], *(_number(row[name]) for name in _PATH_NUMBERS))
        for row in frame.to_dict("records")
    ]
    columns = ("sender", "receiver", "kind", *(name.replace("_", " ") for name in _PATH_NUMBERS))
    _print_table(f"{model.name}, view {model.view}: composition", columns, rows, "lll" + "r" * len(_PATH_NUMBERS))
    _say_cut(len(rows), of, "pair")
    note("null mean, z: random rotations; z paired: against all pairs of the kind, by which rows are sorted")
    for sentence in frame.attrs["notes"]:
        note(sentence)


def print_pairs(frame: pd.DataFrame, model: Model) -> None:
    """The strongest token pairs at both ends."""
    read, write = (name for name in frame.columns if name in ("source", "output", "query", "key"))
    rows = [
        (row["end"], _tokens([row[read]]), _tokens([row[write]]), _number(row["value"]))
        for row in frame.to_dict("records")
    ]
    title = f"{model.name}, head {frame.attrs['head']}, view {model.view}: {frame.attrs['circuit']}"
    offset = frame.attrs.get("offset")
    _print_table(title + ("" if offset is None else f", offset {offset}"), ("end", read, write, "value"), rows, "lllr")
    note(
        "value: logit moved by full attention to the source, up to the norms' scales"
        if read == "source"
        else "value: part of the attention score, before the softmax, up to the norms' scales"
    )


def print_changes(frame: pd.DataFrame, of: int) -> None:
    """Heads of two checkpoints against each other, of so many."""
    shown = {
        "ov_change": "OV change",
        "ov_cosine": "cosine",
        "write_angle": "write angle, °",
        "read_angle": "read angle, °",
        "qk_change": "QK change",
        "eigen_copying_ov_change": "copying change",
        "eigen_copying_full_change": "full copying change",
    }
    names = [name for name in shown if name in frame.columns]
    rows = [
        (row["head"], *(f"{row[name]:.2f}" if name.endswith("_angle") else _number(row[name]) for name in names))
        for row in frame.to_dict("records")
    ]
    title = f"{frame.attrs['model']} to {frame.attrs['other']}, view {frame.attrs['view']}"
    _print_table(title, ("head", *(shown[name] for name in names)), rows, "l" + "r" * len(names))
    _say_cut(len(rows), of, "head")
    note(
        "change: norm of the difference over the base's norm, of copying the difference; cosine: of the two OV circuits; "
        "angle: the largest principal angle of the two spaces; overlaps and both models' own scores: --json or -o"
    )


def head_facts(head: Head, n_directions: int, n_tokens: int) -> dict[str, Any]:
    """What ``head`` knows, ready for JSON."""
    from ov_circuits.scores.board import SCORES, LayerCircuits
    from ov_circuits.scores.broken import broken_tensors
    from ov_circuits.scores.directions import directions
    from ov_circuits.words import token_list

    model = head.model
    circuits = LayerCircuits(model, head.layer)
    finite = bool(model.layer(head.layer).finite_heads[head.index])
    possible = [score for score in SCORES.values() if model.has_embeddings or not score.needs_embeddings]
    facts: dict[str, Any] = {
        "model": model.name,
        "view": model.view,
        "head": head.label,
        "kv_head": head.kv_head,
        "heads_per_kv_head": model.architecture.group_size,
        "shapes": {name: list(getattr(head, name).shape) for name in ("W_Q", "W_K", "W_V", "W_O")},
        "scores": {score.key: float(score.compute(circuits)[head.index]) if finite else None for score in possible},
        "singular_values": circuits.ov.singular_values[head.index].tolist() if finite else [],
        "directions": [],
    }
    broken = "; ".join(() if finite else broken_tensors(model, head.layer))
    facts["note"] = None if finite else f"its weights hold NaN or infinity: it has no scores ({broken})"
    if finite and not model.has_embeddings:
        facts["note"] = f"singular directions cannot be read as tokens: {model.why_no_vocabulary}"
    if facts["note"]:
        return facts
    found = directions(model, head.layer, k=n_directions, tokens=n_tokens)
    ends = {"reads": found.reads, "writes": found.writes}
    for k in range(found.values.shape[-1]):
        direction: dict[str, Any] = {
            "value": float(found.values[head.index, k]),
            "energy": float(found.energy[head.index, k]),
            "separable": bool(found.separable[head.index, k]),
        }
        for side, end in ends.items():
            direction[f"{side}_plus"] = token_list(model, end.plus[head.index, k].tolist())
            direction[f"{side}_minus"] = token_list(model, end.minus[head.index, k].tolist())
        facts["directions"].append(direction)
    return facts


def print_head(facts: dict[str, Any]) -> None:
    """What :func:`head_facts` found."""
    group = f" (key/value head {facts['kv_head']})" if facts["heads_per_kv_head"] > 1 else ""
    title = f"{facts['model']}, head {facts['head']}{group}, view {facts['view']}"
    values = facts["singular_values"]
    shown = ", ".join(_number(value) for value in values[:8]) + (
        f", .. {_number(values[-1])}" if len(values) > 8 else ""
    )
    rows: list[tuple[str, ...]] = [(name, f"{shape}") for name, shape in facts["shapes"].items()]
    rows += [(name, _number(value)) for name, value in facts["scores"].items()]
    _print_table(title, None, [*rows, (counted(len(values), "singular value"), shown)], "ll")
    if not facts["directions"]:
        note(facts["note"])
        return
    rows = []
    for number, found in enumerate(facts["directions"]):
        gap = "" if found["separable"] else " ~"
        first = (f"{number}{gap}", _number(found["value"]), f"{100 * found['energy']:.1f} %")
        rows.append((*first, "+", _tokens(found["reads_plus"]), _tokens(found["writes_plus"])))
        rows.append(("", "", "", "-", _tokens(found["reads_minus"]), _tokens(found["writes_minus"])))
    columns = ("pair", "value", "energy", "end", "what excites it", "what is then written")
    _print_table("Leading singular pairs of W_V W_O, both ends", columns, rows, "lrrlll")
    if any(not found["separable"] for found in facts["directions"]):
        note("~ nearly equal to its neighbour: only the span of the two means something")


def print_certificate(certificate: Certificate) -> None:
    """The checks of ``verify``."""
    words = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("not possible", "yellow")}
    rows = [
        (_styled(*words[check.passed]), check.name, _number(check.value), _number(check.limit), check.detail)
        for check in certificate.checks
    ]
    _print_table(f"{certificate.model}: {certificate.summary}", ("", "check", "error", "limit", ""), rows, "llrrl")


def print_account(frame: pd.DataFrame, trace: Trace, top: int) -> None:
    """A ledger: the sum beside the model's own number, by component, and its strongest heads."""
    attrs = frame.attrs
    bos = "BOS added" if attrs["bos_added"] else "no BOS added"
    print_plain = stdout().print
    print_plain(f"{trace.model.name} on {_tokens(list(trace.texts))} ({bos})", markup=False, highlight=False)
    print_plain(
        f"{attrs['quantity']}: model {attrs['logit']:.5f}, account {attrs['total']:.5f}, residual {attrs['residual']:.1e}",
        markup=False,
        highlight=False,
        style="bold",
    )
    kinds = frame.groupby(["component", "kind"], sort=False)["value"].agg(["sum", "size"])
    rows: list[tuple[str, ...]]
    rows = [(str(c), str(kind), str(size), f"{value:+.4f}") for (c, kind), value, size in kinds.itertuples()]
    _print_table("Components", ("component", "kind", "entries", "value"), rows, "llrr")
    entries = frame[frame["component"] == "head"]
    parts = entries.pivot_table(index="head", columns="kind", values="value", aggfunc="sum", sort=False)
    parts = parts.reindex(columns=["value_path", "value_bias"]).fillna(0.0)
    parts = parts.assign(total=parts.sum(axis=1)).sort_values("total", key=abs, ascending=False).head(top)
    rows = []
    for label, path, bias, total in parts.itertuples():
        moved = entries[(entries["head"] == label) & (entries["kind"] == "value_path")]
        rows.append((str(label), f"{total:+.4f}", f"{path:+.4f}", f"{bias:+.4f}", _strongest_source(moved, trace)))
    columns = ("head", "in all", "value path", "value bias", "strongest source")
    _print_table("Strongest heads", columns, rows, "lrrrl")
    note("value path: attention to source tokens; value bias: written whatever is attended to. A direct effect only.")


def print_scan(scan: Scan, top: int, head: str | None) -> None:
    """The heads of a scan that save most loss, and one head's examples."""
    facts = scan.facts
    kinds = [name for name in scan.heads.columns if name.startswith("attention_")]
    sampled = facts["loss_sample"] < facts["positions"]
    rows: list[tuple[str, ...]] = []
    for row in scan.heads.sort_values("loss_saved", ascending=False).head(top).to_dict("records"):
        most = max(kinds, key=lambda kind: row[kind])
        error = f"± {row['loss_saved_se']:.4f}" if sampled else ""
        numbers = (f"{row['loss_saved']:+.4f}", error, f"{row['logit']:+.3f}")
        means = (_number(row["write"]), f"{row['distance']:.1f}", f"{row['entropy']:.2f}")
        rows.append((row["head"], *numbers, *means, f"{_words(most)} {row[most]:.0%}"))
    columns = ("head", "loss saved", "", "logit", "write", "distance", "entropy", "attends most to")
    title = f"{facts['model']} over {facts['corpus']}: {counted(facts['positions'], 'position')}, loss {facts['loss']:.3f} nats"
    _print_table(title, columns, rows, "lrlrrrrl")
    _say_cut(len(rows), len(scan.heads), "head")
    if head is not None:
        for measure, what in (("write", "largest writes"), ("logit", "most logit to the true next token")):
            _print_examples(scan.of(head), measure, f"{head}: {what}")
    bos = "BOS before each window" if facts["bos_added"] else "no BOS"
    error = f" ± one standard error of a sample of {facts['loss_sample']}," if sampled else ""
    note(
        f"means a position; windows of {facts['window']}, {bos}; loss saved by the head's direct write alone, in nats,{error} "
        "over these positions; distance in tokens, without the window's first one; entropy in nats"
    )


def _print_examples(examples: pd.DataFrame, measure: str, title: str) -> None:
    rows: list[tuple[str, ...]] = []
    for row in examples[examples["measure"] == measure].to_dict("records"):
        # The first of each tenth, and a few of the strongest.
        kind = {"strongest": "strongest", "decile": f"tenth {row['decile']}"}.get(row["kind"])
        if kind is None or row["rank"] > (5 if kind == "strongest" else 1):
            continue
        text = f"{row['before']}⟦{row['destination']}⟧{row['after']}".replace("\n", "⏎")
        rows.append((kind, f"{row['value']:+.3f}", f"{row['attention']:.2f}", _tokens([row["source"]]), text))
    _print_table(title, ("", "value", "attention", "from", "text, destination in brackets"), rows, "lrrll")


def _words(column: str) -> str:
    """``attention_same_token`` -> ``same token``."""
    return column.removeprefix("attention_").replace("_", " ")


def print_ablation(frame: pd.DataFrame, top: int) -> None:
    """What removing heads does: a row a prompt, or a row a head where each was removed alone."""
    attrs = frame.attrs
    how = attrs["method"] + ("" if attrs["direction"] is None else f", singular direction {attrs['direction']}")
    how += ", everything else frozen" if attrs["freeze"] else ""
    if "heads" in attrs:
        title = f"{attrs['model']} without {', '.join(attrs['heads'])} ({how})"
        columns = ["prompt", "answer", "against", "clean", "ablated", "direct_effect", "total_effect"]
        columns += ["clean_loss", "ablated_loss", "kl"]
    else:
        title = f"{attrs['model']}, each head alone ({how}), {counted(attrs['prompts'], 'prompt')}"
        columns = ["head", "direct_effect", "total_effect", "loss_change", "answer_loss_change", "kl", "mean_kl"]
        frame = frame.sort_values("total_effect", key=abs, ascending=False)
    shown = frame if "heads" in attrs else frame.head(top)
    words = ("prompt", "head", "answer", "against")
    rows = [
        [str(row[name]) if name in words[:2] else (row[name] and _tokens([row[name]])) if name in words else _number(row[name])
         for name in columns]
        for row in shown.to_dict("records")
    ]  # fmt: skip
    align = "".join("l" if name in words else "r" for name in columns)
    _print_table(title, [name.replace("_", " ") for name in columns], rows, align)
    _say_cut(len(shown), len(frame), "head")
    note(
        "direct effect: the ledger's entry of what was removed; total effect: what the logit (difference) lost; "
        "loss: the prompt's tokens, their mean; answer loss: the answer; kl: clean to ablated probabilities at the answer"
        + ("" if "heads" in attrs else ", mean kl: over the prompt")
        + "; all in nats"
    )


def print_finding(finding: Finding) -> None:
    """A claim's verdict and what was measured."""
    style = {"supported": "bold green", "not supported": "bold red"}.get(finding.verdict, "bold yellow")
    line = stdout().print
    line(_styled(f"{finding.model}: {finding.claim}: {finding.verdict}", style), highlight=False)
    line(finding.reason, markup=False, highlight=False, soft_wrap=True)
    if not finding.effects:
        return
    rows = [
        (
            effect.name,
            f"{effect.value:+.4g}",
            f"{effect.low:+.3g} to {effect.high:+.3g}",
            f"{effect.others:+.4g}",
            f"{effect.difference_low:+.3g} to {effect.difference_high:+.3g}",
            f"{effect.at_least_as_strong} of {len(finding.others)}",
            effect.what,
        )
        for effect in finding.effects
    ]
    columns = ("effect", "head", "95 %", "others", "difference, 95 %", "as strong", "what it is")
    _print_table(f"{counted(finding.prompts, 'prompt')}, against {', '.join(finding.others)}", columns, rows, "lrrrrrl")


def print_generation(found: Generation, top: int) -> None:
    """A continuation, token by token, with the heads that chose each."""
    heads = found.heads()
    rows = []
    for number, step in enumerate(found.steps):
        own = heads[heads["step"] == number].sort_values("value", key=abs, ascending=False).head(top)
        strongest = "  ".join(f"{row['head']} {row['value']:+.2f}" for row in own.to_dict("records"))
        chosen = (_tokens([step.text]), f"{step.probability:.3f}", _tokens([step.runner_up_text]))
        difference = f"{step.account.reading.actual:+.3f}"
        rows.append((str(number), *chosen, f"{step.runner_up_probability:.3f}", difference, strongest))
    columns = ("step", "token", "p", "runner-up", "p", "logit difference", "strongest heads, directly")
    bos = "BOS added" if found.trace.bos_added else "no BOS added"
    _print_table(f"{found.trace.model.name} after {counted(found.start, 'token')} ({bos})", columns, rows, "llrlrrl")
    if found.ended:
        note("the model ended the text itself")


def _strongest_source(moved: pd.DataFrame, trace: Trace) -> str:
    row = moved.iloc[int(moved["value"].abs().to_numpy().argmax())]
    return f"{row['value']:+.4f} from {_tokens([trace.texts[int(row['source'])]])} at {row['source']}"


def _tokens(texts: Sequence[str]) -> str:
    """Token texts in quotes, control characters escaped; a space is shown as ``·``, so that no line breaks inside a token."""
    return " ".join(repr(text).replace(" ", "·") for text in texts)


def _number(value: float | None, decimals: int | None = None) -> str:
    """Four digits, or a fixed number of decimals; a dash where there is none."""
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"


def _signed(value: float) -> str:
    """Three decimals and a sign; a dash where there is no number."""
    return "-" if value != value else f"{value:+.3f}"


def _short(n: int) -> str:
    """16777216 -> ``16.8 M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.1f} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return str(n)


def _styled(text: str, style: str) -> Any:
    from rich.text import Text

    return Text(text, style=style)


def _print_table(title: str, columns: Sequence[str] | None, rows: Sequence[Sequence[Any]], align: str) -> None:
    """A rich table; texts are taken literally, never as markup. ``align`` holds l or r a column, l when it is short."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=columns is not None)
    for i, name in enumerate(columns or ("", "")):
        # On a narrow terminal long names and texts are folded, numbers and the first column never.
        fixed = i == 0 or align[i : i + 1] == "r"
        least = max((Text(cell).cell_len for row in rows if isinstance(cell := row[i], str)), default=0) if fixed else 0
        justify: JustifyMethod = "right" if align[i : i + 1] == "r" else "left"
        table.add_column(Text(name), justify=justify, min_width=least, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    stdout().print(
        Text(title, style="bold"), soft_wrap=True
    )  # rich would fold a table's own title to the table's width
    stdout().print(table)


def _say_cut(shown: int, of: int, what: str) -> None:
    """A word on rows that the screen leaves out."""
    if shown < of:
        note(f"{shown} of {counted(of, what)}; --top lists more")


def _say_first(shown: int, model: Model, sort: str | None) -> None:
    """A word on heads that --top leaves out of a table in the order of layers, where the first are not the strongest."""
    if sort is None and shown < len(model.head_labels):
        note(f"the first {shown} of {counted(len(model.head_labels), 'head')}, by layer; --sort puts the largest first")


def print_json(value: Any) -> None:
    """JSON to standard output."""
    from ov_circuits.report.tables import dumps

    print(dumps(value))


def note(text: str) -> None:
    """A word on what is going on, to standard error; of processes that work together, the first one's."""
    if not is_first():
        return
    stderr().print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def stdout() -> Console:
    """Where results go."""
    from rich.console import Console

    # In a pipe rich would assume 80 columns and fold numbers; a terminal says its own width.
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def stderr() -> Console:
    """Where words go."""
    from rich.console import Console

    return Console(stderr=True)
