"""A made-up model for the page: every part of the payload, with tokens that try to break out of it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ov_circuits.report.prompt import COMPONENT_NAMES

# What vocabularies hold. Each of these would end an element, start a script, reverse a line or vanish, if it were taken for markup.
NASTY_TOKENS = [
    "<script>window.xss=1</script>",
    "</textarea>",
    "</script>",
    "<!--",
    "]]>",
    "<img src=x onerror=window.xss=1>",
    '"',
    "'",
    "\u202e",
    "\n",
    "\t",
    "\x00",
    "\udce2",
    "\ufffd",
    "😀",
    "👩\u200d🚀",
    "$x$",
    "<b>",
    "<br>",
    "&lt;",
    "%{x}",
    "\u0301",
    "",
    " ",
    "   ",
    "·",
    "\u200b",
    "שלום",
    " Paris",
    "Paris",
    " Mary",
    " John",
    " a" * 30,
    "{{ title }}",
    "\\u003c",
]

# The sizes that a page is made for.
SHAPES: dict[str, dict[str, Any]] = {
    "270 heads": {"n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "d_head": 64, "n_vocab": 49_152},
    "1024 heads": {
        "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_head": 128, "prompt": False, "n_directions": 10,
        "n_vocab": 128_256,
    },
}  # fmt: skip

SCORES = [
    ("eigen_copying_ov", "Eigenvalue copying, residual space", "Copying", True, [-1, 1]),
    ("eigen_copying_full", "Eigenvalue copying, vocabulary space", "Copying", True, [-1, 1]),
    ("copying_embed_top1", "Rank copying, top 1, source W_E", "Copying", False, [0, 1]),
    ("copying_embed_top10", "Rank copying, top 10, source W_E", "Copying", False, [0, 1]),
    ("frobenius_norm", "Frobenius norm of OV", "Spectrum", False, None),
    ("spectral_norm", "Spectral norm of OV", "Spectrum", False, None),
    ("stable_rank", "Stable rank of OV", "Spectrum", False, None),
    ("participation_ratio", "Participation ratio of OV", "Spectrum", False, None),
    ("composition_k_z", "K-composition, largest z as sender", "Composition", True, None),
]


def packed(array: np.ndarray, dtype: str = "f2") -> dict[str, Any]:
    scale = 1.0
    if dtype == "u2":
        scale = float(array.max()) / 65535 or 1.0
        stored = np.round(array / scale).astype("<u2")
    else:
        stored = array.astype(f"<{dtype}")
    return {
        "dtype": dtype,
        "shape": list(array.shape),
        "scale": scale,
        "data": base64.b64encode(stored.tobytes()).decode(),
    }


def make_payload(
    n_layers: int = 4,
    n_heads: int = 6,
    n_kv_heads: int | None = None,
    d_head: int = 16,
    *,
    prompt: bool | str = True,
    embeddings: bool = True,
    examples: bool = True,
    sets: bool = True,
    tokens: list[str] | None = None,
    n_directions: int = 8,
    n_top: int = 8,
    n_vocab: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """`prompt` is True, False, or "patterns" for a prompt without an answer; `n_vocab` tokens are known to the search."""
    rng = np.random.default_rng(seed)
    n_kv_heads = n_kv_heads or n_heads
    n = n_layers * n_heads
    tokens = list(tokens if tokens is not None else NASTY_TOKENS)

    depth = np.repeat(np.linspace(0, 1, n_layers), n_heads)
    copying = np.tanh(rng.normal(0.6 * depth - 0.2, 0.55))
    values = {
        "eigen_copying_ov": copying,
        "eigen_copying_full": np.tanh(np.arctanh(copying) + rng.normal(0, 0.25, n)),
        "copying_embed_top1": np.clip(copying, 0, 1) ** 2 * rng.uniform(0.6, 1, n),
        "copying_embed_top10": np.clip(copying, 0, 1) ** 1.4 * rng.uniform(0.8, 1, n),
        "frobenius_norm": np.exp(rng.normal(1 + depth, 0.35)),
        "spectral_norm": np.exp(rng.normal(0.2 + depth, 0.3)),
        "stable_rank": rng.uniform(2, d_head * 0.8, n),
        "participation_ratio": rng.uniform(3, d_head, n),
        "composition_k_z": rng.normal(0, 3, n),
    }
    lists: dict[str, list[float | None]] = {key: list(map(float, value)) for key, value in values.items()}
    lists["composition_k_z"][-1] = None
    scores = list(SCORES)
    prompt_set = make_set(rng, n, tokens) if sets else None
    if prompt_set is not None:
        scores.append(("set_mean", "Mean attribution on the prompt set", "Prompt set", True, None))
        lists["set_mean"] = prompt_set["heads"]["mean"]

    def one_token() -> dict[str, int]:
        return {"token": int(rng.integers(len(tokens)))}

    def token_pairs(sign: int) -> list[list[float]]:
        return [[*map(int, rng.choice(len(tokens), 2)), sign * float(v)] for v in np.sort(rng.uniform(1, 9, 6))[::-1]]

    def pairs() -> list[list[float]]:
        chosen = rng.choice(len(tokens), size=n_top, replace=len(tokens) < n_top)
        return [[int(t), float(v)] for t, v in zip(chosen, np.sort(rng.uniform(0.1, 2, n_top))[::-1], strict=True)]

    cards = []
    for head in range(n):
        singular = (
            np.sort(np.abs(rng.normal(0, 1, d_head)) * np.exp(-np.arange(d_head) / (d_head / 3)))[::-1]
            * lists["frobenius_norm"][head]
        )
        energy = singular**2 / (singular**2).sum()
        angles = rng.normal(0, 0.9, d_head // 2) + (0 if copying[head] > 0 else np.pi)
        radii = rng.gamma(2, 0.4, d_head // 2)
        eigen = [
            [float(r * np.cos(a)), float(sign * r * np.sin(a))]
            for r, a in zip(radii, angles, strict=True)
            for sign in (1, -1)
        ]
        directions = [
            {
                "value": float(singular[k]),
                "energy": float(energy[k]),
                "separable": k != 1,
                "reads": {"plus": pairs(), "minus": pairs()},
                "writes": {"plus": pairs(), "minus": pairs()},
            }
            for k in range(min(n_directions, d_head))
        ]
        cards.append(
            {
                "singular_values": [float(v) for v in singular],
                "null_low": [float(v) for v in 0.8 * singular.mean() * np.linspace(1.6, 0.2, d_head)],
                "null_high": [float(v) for v in singular.mean() * np.linspace(1.6, 0.3, d_head)],
                # Every other head's pairs were not read.
                "pairs": {"positive": token_pairs(1), "negative": token_pairs(-1)}
                if embeddings and head % 2 == 0
                else None,
                "evidence": [
                    f"Its strongest direction ({energy[0]:.0%} of the squared norm of OV) reads ",
                    one_token(),
                    " and writes ",
                    one_token(),
                    "; it reads from ",
                    {"head": 0},
                    " by K-composition (z 9).",
                ],
                "eigenvalues_ov": eigen,
                "eigenvalues_full": [[3 * re, 3 * im] for re, im in eigen] if embeddings else None,
                "directions": directions if embeddings else None,
            }
        )

    return {
        "format": 1,
        "title": "made-up <model> · ov_circuits",
        "meta": {
            "model": "made-up <model>",
            "source": "/models/made-up",
            "family": "llama" if n_kv_heads != n_heads else "gpt2",
            "n_layers": n_layers,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "d_model": n_heads * d_head,
            "d_head": d_head,
            "n_vocab": 50257,
            "norm": "RMSNorm" if n_kv_heads != n_heads else "LayerNorm",
            "positions": "rotary" if n_kv_heads != n_heads else "learned",
            "tied": True,
            "n_parameters": 134_515_008,
            "view": "folded",
            "view_note": "The reading norm's gain is folded into W_Q, W_K and W_V, the final norm's gain into W_U.",
            "version": "0.1.0",
            "spectrum_null": "range of 8 draws of something <b>random</b>",
            "certificate": {
                "passed": True,
                "checks": [
                    {
                        "name": "Sum of heads",
                        "passed": True,
                        "value": 3.1e-7,
                        "limit": 1e-5,
                        "detail": "heads' writes + b_O against attn_out, every layer and position",
                    },
                    {
                        "name": "One token",
                        "passed": True,
                        "value": 8.2e-8,
                        "limit": 1e-5,
                        "detail": "attention is 1 on itself",
                        "meaning": "Each query head is paired with its right key/value head.",
                    },
                    {
                        "name": "Closed account",
                        "passed": None,
                        "value": None,
                        "limit": 1e-4,
                        "detail": "no prompt was given",
                    },
                ],
            },
            "notes": ["This model does not exist."],
        },
        "scores": [
            {
                "key": key,
                "label": label,
                "group": group,
                "diverging": diverging,
                "range": span,
                "source": "Elhage et al. 2021",
                "note": f"{label}: what it is, in a sentence that a reader can check against the definition.",
            }
            for key, label, group, diverging, span in scores
        ],
        "values": lists,
        "cards": cards,
        "tokens": tokens,
        "composition": make_composition(rng, n_layers, n_heads) if n_layers > 1 else None,
        "spaces": make_spaces(rng, n, n_layers),
        "prompt": make_prompt(rng, n_layers, n_heads, tokens, answered=prompt is True) if prompt else None,
        **({"examples": make_examples(rng, n_layers, n_heads, tokens)} if examples else {}),
        **({"search": make_search(rng, cards, n_vocab)} if n_vocab else {}),
        **({"prompt_set": prompt_set, "generation": make_continuation(rng, n, tokens)} if sets else {}),
    }


def make_search(rng: np.random.Generator, cards: list[dict[str, Any]], n_vocab: int) -> dict[str, Any]:
    """Forty tokens of every end."""

    def ends() -> dict[str, list[int]]:
        return {end: rng.integers(n_vocab, size=40).tolist() for end in ("plus", "minus")}

    return {
        "tokens": [f" token{k}" for k in range(n_vocab)],
        "places": [[{"reads": ends(), "writes": ends()} for _ in card["directions"]] for card in cards],
    }


def make_examples(rng: np.random.Generator, n_layers: int, n_heads: int, tokens: list[str]) -> dict[str, Any]:
    """Three strongest examples a head, the last with its source out of sight, and ten by tenths."""

    def example(kind: str, place: int) -> dict[str, Any]:
        left, source, right, destination = (str(t) for t in rng.choice(np.array(tokens, dtype=object), 4))
        near = kind == "strongest" and place < 2
        return {
            "measure": "write",
            "kind": kind,
            "decile": place + 1 if kind == "decile" else None,
            "document": 0,
            "position": 90,
            "source_position": 88 if near else 40,
            "value": float(5 - place / 3),
            "part": 1.0,
            "attention": 0.4,
            "source_before": left,
            "source": source,
            "source_after": right,
            "before": f"so says {left}{source}{right}" if near else "so says the text",
            "destination": destination,
            "after": " and goes on",
            "attended": [[source, 0.4, 1.0, 2], [destination, 0.3, -0.25, 0], [left, 0.05, 0.004, None]]
            if near
            else [[destination, 0.6, 0.5, 0], [right, 0.2, 0.1, 39]],
        }

    numbers = {
        "write": 1.0,
        "logit": -0.1,
        "loss_saved": 0.0123,
        "loss_saved_se": 0.0004,
        "entropy": 1.5,
        "distance": 9,
    }
    heads = {
        f"{layer}.{head}": {
            "numbers": numbers,
            "attention": [0.5, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05],
            "moved": [0.1, 0.5, 0.1, 0.1, 0.1, 0.05, 0.05],
            "distance": [["first token", 0.5], ["0", 0.1], ["1", 0.4]],
            "examples": [example("strongest", k) for k in range(3)] + [example("decile", k) for k in range(10)],
        }
        for layer in range(n_layers)
        for head in range(n_heads)
    }
    facts = {"corpus": "a <b>text</b>", "positions": 4000, "loss": 3.7}
    kinds = ["first", "self", "previous", "same_token", "after_same_token", "punctuation", "other"]
    return {"facts": facts | {"kinds": kinds}, "heads": heads}


def make_set(rng: np.random.Generator, n: int, tokens: list[str]) -> dict[str, Any]:
    def means() -> dict[str, list[float]]:
        mean = rng.normal(0, 1, n)
        return {"mean": mean.tolist(), "low": (mean - 0.1).tolist(), "high": (mean + 0.2).tolist()}

    shown = tokens[:12]
    return {
        "set": "made <b>up</b>",
        "quantity": "logit of the answer minus logit of the foil",
        "prompts": 50,
        "dropped": {"whose answer is <several> tokens": 2},
        "difference": 1.0,
        "difference_low": 0.8,
        "difference_high": 1.3,
        "residual": 1e-7,
        "share_right": 0.9,
        "interval": "percentile bootstrap over prompts",
        "level": 0.95,
        "heads": means(),
        "roles": {"subject": means(), "other": means()},
        "others": [{"name": "MLP 0", "mean": 0.4, "low": 0.3, "high": 0.5}],
        "examples": [{"tokens": shown, "roles": ["subject", *[None] * 11], "answer": tokens[:8], "foil": [" John"]}],
    }


def make_continuation(rng: np.random.Generator, n: int, tokens: list[str]) -> dict[str, Any]:
    text, start = [" When", *tokens[:8]], 4
    steps = [
        {
            "position": at - 1,
            "token": text[at],
            "probability": 0.5,
            "runner_up": tokens[-k],
            "runner_up_probability": 0.1,
            "difference": 1.5 + k,
            "total": 1.5 + k,
            "residual": 1e-7,
            "sources": [*rng.normal(0, 1, at).tolist(), *[None] * (len(text) - at)],
            "components": [{"component": "head", "value": 1.0}, {"component": "mlp", "value": 0.5 + k}],
        }
        for k, at in enumerate(range(start, len(text)))
    ]
    return {
        "tokens": text,
        "start": start,
        "bos_added": False,
        "greedy": True,
        "ended": True,
        "steps": steps,
        "component_names": COMPONENT_NAMES,
        "head_value": packed(rng.normal(0, 1, (len(steps), n)), "f4"),
        "head_source": rng.integers(0, start, (len(steps), n)).tolist(),
    }


def make_composition(rng: np.random.Generator, n_layers: int, n_heads: int) -> dict[str, Any]:
    """As many paths as a real page holds: each head's five strongest of a kind, and more."""
    n = n_layers * n_heads
    size = min(30 * n, n * (n - n_heads) // 2)
    sender = rng.integers(0, n - n_heads, size)
    first = (sender // n_heads + 1) * n_heads
    receiver = first + (rng.uniform(size=size) * (n - first)).astype(int)
    z = np.sort(rng.normal(2, 3, size))[::-1]
    return {
        "kinds": ["Q", "K", "V"],
        "pairs": n * (n - n_heads) // 2,
        "floor": {"Q": 1.0, "K": 1.0, "V": 1.0},
        "fdr": {"Q": 4.0, "K": 4.5, "V": None},
        "sender": sender.tolist(),
        "receiver": receiver.tolist(),
        "kind": "".join(rng.choice(["Q", "K", "V"], size)),
        "value": [float(v) for v in rng.uniform(0, 0.3, size)],
        "null_mean": [0.05] * size,
        "z": [float(v) for v in 3 * z],
        "z_paired": [float(v) for v in z],
        "notes": ["A note on <b>positions</b>."],
        "source": "Elhage et al. 2021",
    }


def make_spaces(rng: np.random.Generator, n: int, n_layers: int) -> dict[str, Any]:
    places = rng.normal(0, 1, (2, n, 2)).round(4)
    near = [
        [[int(other), float(rng.uniform(5, 15)), 0.2, float(20 - k)] for k, other in enumerate(rng.integers(0, n, 6))]
        for _ in range(n)
    ]
    return {
        "read": places[0].tolist(),
        "write": places[1].tolist(),
        "shares": {"read": [0.1, 0.05], "write": [0.2, 0.03]},
        "neighbours": near if n_layers > 1 else None,
    }


def make_prompt(
    rng: np.random.Generator, n_layers: int, n_heads: int, tokens: list[str], *, answered: bool
) -> dict[str, Any]:
    words = [
        "<|endoftext|>",
        "When",
        " Mary",
        " and",
        " John",
        " went",
        " to",
        " the",
        " store",
        ",",
        "\n",
        " John",
        " gave",
        "<b>",
        "\u202e",
        " a",
        " drink",
        " to",
    ]
    n, t = n_layers * n_heads, len(words)
    scores = rng.normal(0, 1.5, (n, t, t)) + np.where(np.arange(t) == 0, 2.0, 0.0)
    scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
    pattern = np.exp(scores - scores.max(-1, keepdims=True))
    pattern /= pattern.sum(-1, keepdims=True)
    arrays = {
        "pattern": packed(pattern, "u2"),
        "value_weighted": packed(pattern * rng.gamma(2, 1, (n, 1, t))),
        "write_norm": packed(rng.gamma(3, 1, (n, t)), "f4"),
    }
    prompt = {"tokens": words, "ids": list(range(t)), "bos_added": True, "position": t - 1, **arrays}
    if not answered:
        return {**prompt, "answer": None, "against": None}
    source = rng.normal(0, 0.12, (n, t)) * rng.gamma(0.5, 1, (n, 1))
    head_value = source.sum(1)
    components: list[dict[str, Any]] = [
        {"component": "embedding", "layer": None, "value": 0.31},
        {"component": "position", "layer": None, "value": -0.05},
    ]
    for layer in range(n_layers):
        components += [
            {
                "component": "head",
                "layer": layer,
                "value": float(head_value[layer * n_heads : (layer + 1) * n_heads].sum()),
            },
            {"component": "value_bias", "layer": layer, "value": float(rng.normal(0, 0.02))},
            {"component": "b_O", "layer": layer, "value": float(rng.normal(0, 0.05))},
            {"component": "mlp", "layer": layer, "value": float(rng.normal(0.1, 0.3))},
        ]
    components.append({"component": "norm_bias", "layer": None, "value": 0.02})
    total = sum(c["value"] for c in components)
    return {
        **prompt,
        "answer": {"id": 5335, "token": " Mary"},
        "against": {"id": 1757, "token": " John"},
        "logit": total + 2.1e-6,
        "total": total,
        "residual": 2.1e-6,
        "quantity": "logit difference ' Mary' \N{MINUS SIGN} ' John'",
        "components": components,
        "component_names": COMPONENT_NAMES,
        "ablation": {
            "method": "zero",
            "head": list(range(0, n, 2)),
            "direct_effect": head_value[::2].tolist(),
            "total_effect": (0.5 * head_value[::2]).tolist(),
            "answer_loss_change": rng.normal(0, 0.1, len(head_value[::2])).tolist(),
            "kl": rng.gamma(1, 0.1, len(head_value[::2])).tolist(),
        },
        "head_value": [float(v) for v in head_value],
        "head_source": packed(source, "f4"),
    }
