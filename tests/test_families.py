"""Every family against transformers' own model: tensors, attention, writes and logits, on tiny random models.

Right values come from transformers' modules: an attention module that is made to read unit vectors, one token at a time, gives
each query head's values (with one token attention is 1), the attention function it calls gets queries and keys, and the output
projection is fed one head's slots. None of that goes through the package's splitting.
"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import captured, relative_error
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_families import BASES, VARIANTS, attended, module, reading, settings, tiny, with_images
from torch import Tensor

import ov_circuits as ov
from ov_circuits.checkpoint.census import census
from ov_circuits.checkpoint.families import FAMILIES, family_of, language_part
from ov_circuits.checkpoint.in_memory import from_bridge
from ov_circuits.checkpoint.layout import Part
from ov_circuits.checkpoint.mlp import MLP
from ov_circuits.checkpoint.positions import turn
from ov_circuits.errors import CircuitsError
from ov_circuits.linalg.rotary import rotate
from ov_circuits.model import Layer, Model
from ov_circuits.scores.copying import _FinalLayer
from ov_circuits.scores.qk import largest_query_key_pairs, offset_profile, qk_spectra
from ov_circuits.scores.sources import source_embedding
from ov_circuits.source import Source

CLOSE = 1e-5
PLAINLY_WRONG = 0.05
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 8, 11, 22]

# Their attention modules call no attention function of transformers: they split the fused projection in a method.
OWN_ATTENTION = {"bloom": "_reshape", "falcon": "_split_heads"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory):
    """``opened(variant)`` -> (transformers' model, ours from the folder that it was saved in); one a module, read only."""

    @cache
    def get(variant: str) -> tuple[Any, Model]:
        network = tiny(variant)
        folder = tmp_path_factory.mktemp(variant)
        network.save_pretrained(folder)
        return network, ov.load(folder, view="raw")

    return get


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, opened) -> tuple[Any, Model]:
    return opened(request.param)


def unit_rows(d_model: int) -> Tensor:
    """The origin and every unit vector, each a prompt of one token: [1 + d_model, 1, d_model]."""
    return torch.cat([torch.zeros(1, d_model), torch.eye(d_model)]).unsqueeze(1)


def run_reading(network: Any, model: Model, layer: int, rows: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """z [prompt, pos, n_heads * d_head] of an attention that reads these rows, and what its attention function got."""
    family, found = model.source.family, {}
    attention = module(network, family, family.attention, layer)
    output = module(network, family, family.projections["O"].name, layer)
    ids = torch.zeros(rows.shape[:2], dtype=torch.long)
    with torch.no_grad(), reading(attention, rows), captured(output) as seen, attended(found):
        network(ids)
    return seen["args"][0], found.get(layer, {})


def matrix_of(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """(W, b) of a linear map from what it makes of :func:`unit_rows`, [1 + d_model, heads, d_head]."""
    return (outputs[1:] - outputs[0]).transpose(0, 1), outputs[0]


def assert_same(ours: Tensor | None, right: Tensor) -> None:
    """None is a zero bias."""
    ours = torch.zeros_like(right) if ours is None else ours
    if not bool(right.any()):
        assert not bool(ours.any())
    else:
        assert relative_error(ours, right) < CLOSE


def check_split(network: Any, model: Model, layer: int) -> None:
    """W_V, b_V, W_O, b_O, W_Q, W_K and their biases of a layer against what the module does."""
    a, weights, family = model.architecture, model.layer(layer), model.source.family
    rows = unit_rows(a.d_model)
    if a.qkv_clip is not None:
        rows = rows * 0.1  # within the clip
    z, given_ = run_reading(network, model, layer, rows)
    W_V, b_V = matrix_of(z[:, 0].unflatten(-1, (a.n_heads, a.d_head)))
    if a.qkv_clip is not None:
        W_V = W_V / 0.1
    assert_same(weights.per_query_head(weights.W_V), W_V)
    assert_same(None if weights.b_V is None else weights.per_query_head(weights.b_V), b_V)

    output = module(network, family, family.projections["O"].name, layer)
    with torch.no_grad():
        slots = output(torch.cat([torch.zeros(1, a.n_heads * a.d_head), torch.eye(a.n_heads * a.d_head)]))
    slots = slots * float(getattr(network.config, "residual_multiplier", 1.0))
    for head in range(a.n_heads):
        rows_of_head = [1 + head * a.d_head + i for i in range(a.d_head)]
        assert relative_error(weights.W_O[head], slots[rows_of_head] - slots[0]) < CLOSE
    assert_same(weights.b_O, slots[0])

    if family.name in OWN_ATTENTION:
        attention = module(network, family, family.attention, layer)
        with torch.no_grad():
            q, k, _ = getattr(attention, OWN_ATTENTION[family.name])(attention.query_key_value(rows))
        q, k = (x.transpose(1, 2) if family.name == "bloom" else x for x in (q, k))
        given_ = {"query": q.transpose(1, 2), "key": k.transpose(1, 2), "scaling": a.d_head**-0.5}
    query, key = given_["query"][:, :, 0] * given_["scaling"], given_["key"][:, :, 0]  # position 0: nothing is turned
    turned = a.rotary_of(layer)
    by = None if turned is None else turn(turned, model.source.checkpoint.config, "here", 1)
    if by is not None and by.scale != 1:  # but stretched, by some
        query, key = query / by.scale, key / by.scale
    ours_q, ours_k = weights.queries(rows[:, 0]) * weights.score_scale, weights.keys(rows[:, 0])
    if key.shape[1] == a.n_heads:
        ours_k = weights.per_query_head(ours_k)
    assert relative_error(ours_q.transpose(0, 1), query) < CLOSE
    assert relative_error(ours_k.transpose(0, 1), key) < CLOSE
    if a.qk_norm is None and a.qkv_clip is None:
        W_Q, b_Q = matrix_of(query)
        assert_same(weights.W_Q * weights.score_scale, W_Q)
        assert_same(None if weights.b_Q is None else weights.b_Q * weights.score_scale, b_Q)


def test_every_row_of_the_table_is_here():
    assert set(BASES) == set(FAMILIES)


def test_every_tensor_is_what_its_module_does(pair):
    network, model = pair
    for layer in range(model.n_layers):
        check_split(network, model, layer)


def test_what_enters_the_stream_and_what_comes_out(pair):
    network, model = pair
    family, a, s = model.source.family, model.architecture, model.source
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        block, final = module(network, family, family.block), module(network, family, family.final_norm)
        with captured(block) as first, captured(final) as last:
            logits = network(tokens).logits[0]
    stream = (first["args"][0] if first["args"] else first["kwargs"]["hidden_states"])[0]
    entered = model.W_E[TOKENS]
    if model.W_pos is not None:
        entered = entered + model.W_pos[: len(TOKENS)]
    assert relative_error(entered, stream) < CLOSE

    final = last["args"][0][0]
    assert relative_error(s.final_norm(final), last["output"][0]) < CLOSE
    read = s.final_norm(final) @ model.W_U
    read = (read if model.b_U is None else read + model.b_U) * a.logit_scale
    if a.logit_softcap is not None:
        read = a.logit_softcap * (read / a.logit_softcap).tanh()
    assert relative_error(read, logits) < CLOSE
    if a.norm == "LayerNorm":  # centred: the same, up to one number a position
        centred = model.in_view("centred")
        x = final - final.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + a.norm_eps).sqrt()
        read = x @ centred.W_U
        read = (read if centred.b_U is None else read + centred.b_U) * a.logit_scale
        assert relative_error(read, logits) < CLOSE


def test_traces_are_the_models_own_and_add_up(pair):
    network, model = pair
    a, s = model.architecture, model.source
    trace = model.trace(TOKENS)
    with torch.no_grad():
        right = network(torch.tensor([TOKENS]), output_attentions=True, output_hidden_states=True)
    assert relative_error(trace.logits, right.logits[0]) < CLOSE
    streams = [layer.stream for layer in trace.record.layers] + [trace.record.final]
    for index, layer in enumerate(trace.record.layers):
        assert relative_error(layer.pattern, right.attentions[index][0]) < CLOSE
        assert relative_error(layer.stream, right.hidden_states[index][0]) < CLOSE
        assert relative_error(s.attention_norm(index)(layer.stream), layer.attention_input) < CLOSE
        b_O = model.layer(index).b_O
        writes = sum(trace.write(f"{index}.{head}") for head in range(a.n_heads))
        assert relative_error(writes if b_O is None else writes + b_O, layer.attention_output) < CLOSE
        moved = [
            trace.head_writes(f"{index}.{h}").sum(0) + trace.value_bias_write(f"{index}.{h}") for h in range(a.n_heads)
        ]
        assert relative_error(sum(moved), writes) < CLOSE
        post_norm = s.attention_post_norm(index)
        added = layer.attention_output if post_norm is None else post_norm(layer.attention_output)
        assert relative_error(layer.stream + added + layer.mlp_output, streams[index + 1]) < CLOSE


def test_ledgers_close(pair):
    network, model = pair
    trace = model.trace(TOKENS)
    size = float(trace.record.uncapped[-1].abs().max())
    for answer, against in ((7, 2), (0, None)):
        frame = trace.ledger(answer, against)
        assert abs(frame.attrs["residual"]) < CLOSE * size
        assert frame["value"].sum() == pytest.approx(frame.attrs["total"], abs=1e-9 * size)
    for side in "QKV":
        if model.architecture.qkv_clip is not None:
            with pytest.raises(CircuitsError, match="clamps"):
                trace.ledger_into("1.1", side, source=10)
            continue
        frame = trace.ledger_into("1.1", side, source=10)
        assert abs(frame.attrs["residual"]) < CLOSE * max(abs(frame.attrs["logit"]), frame["value"].abs().max())
    if model.architecture.qkv_clip is None and model.architecture.positions != "alibi":
        check_score(network, model, trace)


def check_score(network: Any, model: Model, trace: Any) -> None:
    """The score that a ledger explains is the one of which the pattern is made: differences of log attention within a row."""
    a = model.architecture
    shown = trace.pattern("1.1")[-1]
    scores = torch.tensor([trace.ledger_into("1.1", "Q", source=s).attrs["logit"] for s in range(len(TOKENS))])
    if a.attention_softcap is not None:
        scores = a.attention_softcap * (scores / a.attention_softcap).tanh()
    seen = shown > 0
    assert relative_error(scores[seen].softmax(-1), shown[seen]) < 10 * CLOSE


def test_the_certificate_checks_everything(pair):
    _, model = pair
    certificate = model.verify()
    assert [check.passed for check in certificate.checks] == [True] * 5, certificate.frame().to_string()


def test_the_first_mlp_is_the_models(pair):
    _, model = pair
    s, a = model.source, model.architecture
    if s.family.no_mlp is not None:
        with pytest.raises(CircuitsError, match="choose among experts"):
            source_embedding(model, "embed_mlp0")
        return
    record = model.trace(TOKENS).record.layers[0]
    post_norm = s.attention_post_norm(0)
    added = record.attention_output if post_norm is None else post_norm(record.attention_output)
    mlp = MLP.read(s.store, s.family, a, s.checkpoint.config, 0)
    reads = record.stream if a.parallel else record.stream + added
    assert relative_error(mlp(reads), record.mlp_output) < CLOSE


def test_the_effective_embedding_is_the_first_block_on_one_token_without_biases(opened):
    """With no biases anywhere and no positions in the stream, it is the stream after block 0 of a prompt of one token."""
    for variant in ("llama", "gemma2", "olmo2", "granite", "cohere", "olmo", "phi3", "falcon-every-head"):
        network, model = opened(variant)
        biases = model.architecture.biases + (("norm",) if model.architecture.norm_bias else ())
        if biases:
            with torch.no_grad():
                network = tiny(variant)
                for name, parameter in network.named_parameters():
                    if name.endswith(("ln_1.bias", "input_layernorm.bias")):
                        parameter.zero_()
            model = ov.load(network, view="raw")
        with torch.no_grad():
            right = network(torch.arange(23)[:, None], output_hidden_states=True).hidden_states[1][:, 0]
        assert relative_error(source_embedding(model, "effective"), right) < CLOSE, variant


def test_parameters_are_counted(pair):
    network, model = pair
    config = model.source.checkpoint.config
    assert census(config, "here").n_parameters == sum(parameter.numel() for parameter in network.parameters())
    assert not model.source.contents.missing


def test_folded_views_read_and_write_the_same(pair):
    """xhat without gain through folded weights is xhat with gain through raw ones: for values, and for queries without a norm."""
    _, model = pair
    folded, a = model.in_view(ov.load(model.source.checkpoint.where).view), model.architecture
    record = model.trace(TOKENS).record.layers[1]
    x = record.stream
    if model.source.family.attention_norm is not None:
        x = x - x.mean(-1, keepdim=True) if a.norm == "LayerNorm" else x
        x = x / (x.square().mean(-1, keepdim=True) + a.norm_eps).sqrt()
    ours, raw = folded.layer(1), model.layer(1)

    def project(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        out = torch.einsum("tm,hmd->htd", x, W)
        return out if b is None else out + b.unsqueeze(1)

    for W, b in (("W_V", "b_V"), ("W_Q", "b_Q"), ("W_K", "b_K")):
        right = project(record.attention_input, getattr(raw, W), getattr(raw, b))
        norm = None if W == "W_V" else raw.q_norm if W == "W_Q" else raw.k_norm
        found = project(x, getattr(ours, W), getattr(ours, b))
        if norm is None:
            assert relative_error(found, right) < CLOSE
        else:  # parallel to what the norm gives, its own bias aside
            normed = norm(right) if norm.bias is None else norm(right) - norm.bias.unsqueeze(1)
            if norm.whole:
                found, normed = found.transpose(0, 1).flatten(1), normed.transpose(0, 1).flatten(1)
            unit = [rows / rows.norm(dim=-1, keepdim=True) for rows in (found, normed)]
            assert relative_error(unit[0], unit[1]) < CLOSE
    post_norm = model.source.attention_post_norm(1)
    right = raw.W_O if post_norm is None else raw.W_O * post_norm.gain
    if folded.view == "centred":
        right = right - right.mean(-1, keepdim=True)
    assert relative_error(ours.W_O, right) < CLOSE


def test_scores_work_on_every_family(pair):
    _, model = pair
    model = ov.load(model.source.checkpoint.where)
    frame = ov.scoreboard(model)
    found = frame[
        [column for column in frame.columns if not column.startswith("value_bias")]
    ]  # those may have no spread
    assert found.notna().all(axis=None), found.isna().sum()
    assert "norm" in model.view_note
    passes = "passes a norm before it is added" in model.view_note
    assert passes == (model.source.family.attention_post_norm is not None)
    qk_spectra(model, 3 if model.architecture.positions == "rotary" else 0)


# -- sizes varied -------------------------------------------------------------------------------------------------------------

HEADS = st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (6, 3)])


@pytest.mark.parametrize("name", BASES)
@hypothesis_settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    heads=HEADS,
    d_head=st.sampled_from([4, 8, 12]),
    layers=st.integers(1, 3),
    flag=st.booleans(),
    seed=st.integers(0, 99),
)
def test_group_sizes_biases_and_widths(name, heads, d_head, layers, flag, seed):
    n_heads, n_kv = heads
    base = BASES[name][2]
    sizes: dict[str, Any] = {}
    width = n_heads * d_head
    old = "n_embd" in base
    sizes["n_embd" if old else "hidden_size"] = width
    sizes["n_head" if old or name == "bloom" else "num_attention_heads"] = n_heads
    sizes["n_layer" if old or name == "bloom" else "num_hidden_layers"] = layers
    if "head_dim" in base:  # a head's width of its own
        sizes |= {"head_dim": d_head, "hidden_size": 8 * n_heads}
    if "num_key_value_heads" in base:
        sizes["num_key_value_heads"] = n_kv
    if name == "opt":
        sizes["word_embed_proj_dim"] = width
    if name == "gemma3_text":
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    sizes |= {
        "gpt_bigcode": {"multi_query": flag},
        "gptj": {"rotary_dim": 4},
        "llama": {"attention_bias": flag, "mlp_bias": flag},
        "olmo": {"attention_bias": flag},
        "olmo2": {"attention_bias": flag},
        "qwen3": {"attention_bias": flag},
        "gpt_neox": {"attention_bias": flag, "use_parallel_residual": not flag},
        "opt": {"enable_bias": flag},
        "falcon": {"new_decoder_architecture": flag, "num_kv_heads": n_kv, "multi_query": not flag, "bias": flag},
        "stablelm": {
            "use_qkv_bias": flag,
            "qk_layernorm": flag,
            "use_parallel_residual": not flag,
            "partial_rotary_factor": 0.5,
        },
        "cohere": {"use_qk_norm": flag},
        "granite": {"attention_bias": flag},
        "starcoder2": {"use_bias": flag},
    }.get(name, {})
    network = tiny(name, seed, **sizes)
    model = ov.load(network, view="raw")
    a = model.architecture
    assert (a.n_heads, a.d_head, a.n_layers) == (n_heads, d_head, layers)
    for layer in range(layers):
        check_split(network, model, layer)
    with torch.no_grad():
        assert relative_error(model.trace(TOKENS).logits, network(torch.tensor([TOKENS])).logits[0]) < CLOSE
    assert model.verify().passed, model.verify().frame().to_string()


# -- configs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_config_leaves_out_is_what_transformers_takes(variant):
    """A config of a hub model says what its author wrote: the rest must be read as transformers reads it."""
    import transformers

    base, keywords = settings(variant)
    said = json.loads(
        json.dumps({"model_type": base} | {key: value for key, value in keywords.items() if key != "pad_token_id"})
    )
    full = getattr(transformers, BASES[base][0])(**keywords).to_dict()
    family = family_of(said, "here")
    assert family == family_of(full, "here")
    bare, whole = family.architecture(said), family.architecture(full)
    assert bare == whole


@pytest.mark.parametrize("base", BASES)
def test_defaults_are_those_of_transformers(base):
    """Nothing but the sizes that no default can stand for."""
    import transformers

    config = getattr(transformers, BASES[base][0])()
    full = config.to_dict()
    sizes = {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "n_embd",
        "n_layer",
    }
    sizes |= {"n_head", "ffn_dim", "n_positions"}
    said = {"model_type": base} | {key: value for key, value in full.items() if key in sizes}
    family = family_of(said, "here")
    ours, theirs = family.architecture(said), family.architecture(full)
    if "max_position_embeddings" in full or base == "bloom":
        assert ours.n_ctx == theirs.n_ctx
    assert ours == theirs


def test_old_configs_of_gemma_3_and_phi_3():
    """As the hub has them: flat rotary settings, 'type' for 'rope_type'."""
    import transformers

    sizes = BASES["gemma3_text"][2]
    flat = sizes | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    full = transformers.Gemma3TextConfig(**flat).to_dict()
    said = {"model_type": "gemma3_text"} | flat
    ours = FAMILIES["gemma3_text"].architecture(said)
    assert ours == FAMILIES["gemma3_text"].architecture(full)
    assert [(r.theta, r.kind) for r in ours.rotary] == [(50.0, "default"), (1e6, "linear"), (50.0, "default")]
    scaled = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    said = {"model_type": "phi3", "original_max_position_embeddings": 8, "rope_scaling": scaled} | BASES["phi3"][2]
    (rotary, _) = FAMILIES["phi3"].architecture(said).rotary
    assert rotary.kind != "default"
    assert torch.equal(turn(rotary, said, "here", 20).frequencies * 2, turn(rotary, said, "here", 4).frequencies)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "opt", "do_layer_norm_before": False}, "OPT-350m"),
        ({"model_type": "opt", "word_embed_proj_dim": 12}, "projection stands between"),
        ({"model_type": "opt", "_remove_final_layer_norm": True}, "final norm"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "no sum of what components write"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both ways"),
        ({"model_type": "gptj", "rotary_dim": 500}, "rotary_dim is 500"),
        ({"model_type": "gptj", "rotary_dim": 3}, "an even number"),
        ({"model_type": "granite", "logits_scaling": 0}, "divided by it"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "above 0, or null"),
        ({"model_type": "phi", "partial_rotary_factor": 1.5}, "at most 1"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "each of 2 layers"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"model_type": "smollm3", "no_rope_layers": "x"}, "no_rope_layers"),
        ({"model_type": "llama", "rope_scaling": [8]}, "rope_scaling is [8], not an object"),
        ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "cannot run that"),
    ],
)
def test_configs_that_ask_for_something_else_are_refused(config, words):
    said = BASES[config["model_type"]][2] | config
    with pytest.raises(CircuitsError) as caught:
        family_of(said, "here").architecture(said)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("deepseek_v2", "multi-head latent attention"),
        ("deepseek_v3", "multi-head latent attention"),
        ("mamba", "no heads"),
        ("rwkv", "no heads"),
        ("jamba", "hybrid"),
        ("qwen3_next", "hybrid"),
        ("falcon_h1", "hybrid"),
        ("gemma3n", "share keys and values"),
        ("gpt_oss", "sinks"),
        ("lfm2_moe", "hybrid"),
        ("mistral4", "multi-head latent attention"),
        ("bert", "encoder"),
        ("camembert", "both ways"),
        ("led", "encoder-decoder"),
        ("t5", "encoder-decoder"),
        ("paligemma", "language model alone"),
        ("llava", "language model alone"),
    ],
)
def test_what_is_near_is_refused_by_name_and_reason(model_type, words):
    with pytest.raises(CircuitsError) as caught:
        family_of({"model_type": model_type}, "here")
    assert model_type in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(("base", "kind"), [("gemma3_text", "Gemma3"), ("mistral", "Mistral3")])
def test_of_a_model_of_images_its_language_model_opens(tmp_path, base, kind):
    network = with_images(base, kind)
    network.save_pretrained(tmp_path)
    with torch.no_grad():
        right = network(torch.tensor([TOKENS])).logits[0]
    for model in (ov.load(tmp_path), ov.load(network), ov.load(network.state_dict(), config=network.config)):
        assert model.architecture.family == base
        assert relative_error(model.trace(TOKENS).logits, right) < CLOSE
        assert model.verify().passed
    inside = {*network.model.language_model.parameters(), network.lm_head.weight}
    assert ov.census(network.config.to_dict()).n_parameters == sum(parameter.numel() for parameter in inside)


def test_a_bridge_to_a_model_of_images_is_refused():
    bridge = SimpleNamespace(original_model=with_images("mistral", "Mistral3"), cfg=SimpleNamespace(model_name="x"))
    with pytest.raises(CircuitsError, match="give its original_model"):
        from_bridge(bridge)


def test_what_the_config_of_gemma_3_with_images_leaves_out():
    """As the hub has that of 4B: only what differs from transformers' defaults."""
    import transformers

    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    said["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    part = language_part({"model_type": "gemma3", "text_config": said | {"model_type": "gemma3_text"}}, "here")
    full = transformers.Gemma3TextConfig(**said).to_dict()
    assert FAMILIES["gemma3_text"].architecture(part) == FAMILIES["gemma3_text"].architecture(full)
    assert part["bos_token_id"] == full["bos_token_id"] == 2
    for text in (None, {"model_type": "llama"}):
        with pytest.raises(CircuitsError, match="'gemma3' model whose text_config"):
            language_part({"model_type": "gemma3", "text_config": text}, "here")


def test_heads_of_families_that_turn_whole_heads_are_turned_whole():
    """transformers' Llama pays no heed to the key that says otherwise in others."""
    network = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5})
    assert ov.load(network).verify().passed


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("gemma2", ["a window of 4 in 1 of 2 layers", "scores are capped at 50.0", "logits are capped at 30.0"]),
        ("gemma3_text", ["theta 10000, 1e+06", "queries and keys are normalised"]),
        ("gptj", ["on 4 of 6 coordinates", "pairs are neighbours", "beside the MLP"]),
        ("smollm3", ["theta 2e+06", "none in 1 layer"]),
        ("llama3", ["rescaled (llama3)"]),
        ("olmo-clipped", ["clamped to 0.8"]),
        ("granite", ["logits are multiplied by 0.2"]),
        ("bloom", ["(alibi)"]),
    ],
)
def test_inspect_says_what_is_peculiar(opened, variant, words):
    from typer.testing import CliRunner

    from ov_circuits.cli import app

    result = CliRunner().invoke(app, ["inspect", opened(variant)[1].source.checkpoint.where])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for word in words:
        assert word in text, text


def test_falcon_with_alibi_is_read_and_not_run():
    """transformers 5 adds the alibi once to the mask and once to the scores when it runs eagerly, and gives other logits."""
    network = tiny("falcon", alibi=True, multi_query=False, parallel_attn=False)
    model = ov.load(network, view="raw")
    assert model.architecture.positions == "alibi"
    check_split(network, model, 1)
    with pytest.raises(CircuitsError, match="alibi twice"):
        model.trace(TOKENS)
    fused = tiny("falcon", implementation="sdpa", alibi=True, multi_query=False, parallel_attn=False)
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        assert relative_error(fused(tokens).logits, network(tokens).logits) > 1e-3, "it is mended: run these too"


# -- traps --------------------------------------------------------------------------------------------------------------------


def failed(model: Model) -> set[str]:
    return {check.name for check in model.verify().checks if check.passed is False}


def wrongly(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Take fused parts as another layout has them."""
    monkeypatch.setattr(
        Part,
        "_slots",
        lambda self, a, right=Part._slots: right(self if self.layout == "halves" else Part(self.index, layout), a),
    )


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("gpt_neox", "flat"),
        ("bloom", "flat"),
        ("falcon-grouped", "flat"),
        ("falcon-every-head", "flat"),
        ("gpt_bigcode-every-head", "flat"),
        ("phi3", "grouped"),
        ("gpt2", "grouped"),
    ],
)
def test_a_fused_projection_split_as_another_layout_has_it_is_caught(opened, monkeypatch, variant, layout):
    network, _ = opened(variant)
    model = ov.load(network, view="raw")
    right = model.layer(0)
    wrongly(monkeypatch, layout)
    wrong = ov.load(network, view="raw")
    assert wrong.layer(0).W_V.shape == right.W_V.shape  # nothing in the shapes tells
    assert relative_error(wrong.layer(0).W_V, right.W_V) > PLAINLY_WRONG
    assert {"one token", "query-key pattern", "ledger"} <= failed(wrong)
    with pytest.raises(AssertionError):
        check_split(network, wrong, 0)


def test_one_key_value_head_is_the_same_flat_and_grouped(opened, monkeypatch):
    network, model = opened("gpt_bigcode")
    wrongly(monkeypatch, "flat")
    assert torch.equal(ov.load(network, view="raw").layer(0).W_V, model.layer(0).W_V)


@pytest.mark.parametrize("variant", ["falcon-grouped", "phi3", "qwen2", "gemma2", "cohere", "granite"])
def test_tiled_groups_are_caught(opened, monkeypatch, variant):
    network, _ = opened(variant)
    monkeypatch.setattr(Layer, "per_query_head", lambda self, t: t.repeat(len(self.W_Q) // len(t), *[1] * (t.ndim - 1)))
    assert {"one token", "query-key pattern"} <= failed(ov.load(network, view="raw"))


def forgetting(**facts: Any):
    """Open a model whose architecture says otherwise."""
    from dataclasses import replace

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        init = Source.__init__

        def forget(self: Source, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            changed = {name: value(self.architecture) if callable(value) else value for name, value in facts.items()}
            self.architecture = replace(self.architecture, **changed)

        monkeypatch.setattr(Source, "__init__", forget)

    return change


def rotary(**changes: Any):
    from dataclasses import replace

    return forgetting(rotary=lambda a: tuple(r if r is None else replace(r, **changes) for r in a.rotary))


FORGOTTEN = {
    "gains are 1 + w": ("gemma", forgetting(norm_gain="stored"), {"ledger"}),
    "sqrt(d_model) on embeddings": ("gemma", forgetting(embed_scale=1.0), {"ledger"}),
    "residual multiplier": ("granite", forgetting(residual_scale=1.0), {"ledger"}),
    "attention multiplier": ("granite", forgetting(score_multiplier=None), {"query-key pattern"}),
    "logits scaling": ("granite", forgetting(logit_scale=1.0), {"ledger"}),
    "logit scale": ("cohere", forgetting(logit_scale=1.0), {"ledger"}),
    "query_pre_attn_scalar": ("gemma2", forgetting(score_multiplier=None), {"query-key pattern"}),
    "attention softcap": ("gemma2", forgetting(attention_softcap=None), {"query-key pattern"}),
    "sliding windows": ("gemma2", forgetting(windows=()), {"query-key pattern"}),
    "windows in the other layers": ("gemma2", forgetting(windows=lambda a: a.windows[::-1]), {"query-key pattern"}),
    "local rotary base": ("gemma3_text", rotary(theta=1e6), {"query-key pattern"}),
    "neighbours, not halves": ("cohere", rotary(interleaved=False), {"query-key pattern"}),
    "halves, not neighbours": ("llama", rotary(interleaved=True), {"query-key pattern"}),
    "neighbours, not halves (GPT-J)": ("gptj", rotary(interleaved=False), {"query-key pattern"}),
    "rotary in part": ("gpt_neox", rotary(dim=8), {"query-key pattern"}),
    "rotary in part (StableLM)": ("stablelm", rotary(dim=8), {"query-key pattern"}),
    "rescaled frequencies": ("llama3", rotary(kind="default"), {"query-key pattern"}),
    "layers without positions": ("smollm3", forgetting(rotary=lambda a: (a.rotary[0],) * 4), {"query-key pattern"}),
    "norms of queries and keys": ("qwen3", forgetting(qk_norm=None), {"query-key pattern"}),
    "those over a head, not all": ("olmo2", forgetting(qk_norm="own head"), {"query-key pattern"}),
    "alibi": ("bloom", forgetting(positions="none"), {"query-key pattern"}),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_forgotten_is_caught(opened, monkeypatch, what):
    variant, change, caught = FORGOTTEN[what]
    network, _ = opened(variant)
    if what == "those over a head, not all":  # the stored gain has the shape of one over all heads
        monkeypatch.setattr("ov_circuits.checkpoint.norms.qk_norm_shapes", lambda name, a, layer, heads: [
            (name.format(layer=layer), (heads * a.d_head,))])  # fmt: skip
    change(monkeypatch)
    assert failed(ov.load(network, view="raw")) >= caught


def test_positions_of_opt_start_at_row_2(opened):
    network, model = opened("opt")
    stored = network.model.decoder.embed_positions.weight
    assert len(stored) == 19 + 2 and torch.equal(model.W_pos, stored[2:])
    assert relative_error(stored[:19], model.W_pos) > PLAINLY_WRONG


def test_bloom_unembeds_what_it_stores_and_embeds_what_its_norm_gives(opened):
    network, model = opened("bloom")
    stored = network.transformer.word_embeddings.weight
    assert torch.equal(model.W_U, stored.T)
    assert relative_error(model.W_E, network.transformer.word_embeddings_layernorm(stored)) < CLOSE
    assert relative_error(stored, model.W_E) > PLAINLY_WRONG
    head = ov.load(network).head("1.2")
    dense = head.model.W_E.double() @ head.W_V.double() @ head.W_O.double() @ head.model.W_U.double()
    assert (
        relative_error(head.full_ov.singular_values, torch.linalg.svdvals(dense)[: len(head.full_ov.singular_values)])
        < CLOSE
    )


@pytest.mark.parametrize("variant", ["gpt2", "phi", "gptj"])
def test_logits_of_a_stream_of_nothing_are_the_biases_that_ioi_scores_add(opened, variant):
    network, model = opened(variant)
    with torch.no_grad():
        nothing = module(network, model.source.family, model.source.family.final_norm)(
            torch.zeros(model.architecture.d_model)
        )
        right = network.get_output_embeddings()(nothing)
    assert_same(_FinalLayer(model).constant, right)


@pytest.mark.parametrize("variant", ["gemma", "granite-biased"])
def test_full_circuits_have_the_factor_of_the_embedding_once(opened, variant):
    model = ov.load(opened(variant)[0])
    assert model.source.tied
    head = model.head("0.1")
    dense = model.W_E.double() @ head.W_V.double() @ head.W_O.double() @ model.W_U.double()
    singular = head.full_ov.singular_values
    assert relative_error(singular, torch.linalg.svdvals(dense)[: len(singular)]) < CLOSE
    assert relative_error(head.full_ov.trace, dense.trace()) < CLOSE
    assert (
        relative_error(model.W_E, model.W_U.T * model.architecture.embed_scale) > PLAINLY_WRONG or model.view == "raw"
    )


# -- rotary positions in scores ------------------------------------------------------------------------------------------------


def test_turning_in_part_and_by_neighbours_is_what_the_definition_says():
    generator = torch.Generator().manual_seed(0)
    x, positions = torch.randn(5, 10, generator=generator).double(), torch.tensor([0, 1, 2, 7, 30])
    frequencies = torch.tensor([1.0, 0.3, 0.01])
    for interleaved in (False, True):
        turned = rotate(x, positions, frequencies, interleaved=interleaved, scale=1.5)
        for t, position in enumerate(positions.tolist()):
            right = x[t].clone()
            for i, frequency in enumerate(frequencies.tolist()):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
                pair = (
                    torch.complex(x[t, first], x[t, second]) * 1.5 * torch.exp(torch.tensor(1j * position * frequency))
                )
                right[first], right[second] = pair.real, pair.imag
            assert relative_error(turned[t], right) < 1e-6


@pytest.mark.parametrize(
    "variant", ["gpt_neox", "cohere", "qwen3", "olmo2", "llama3", "llama-yarn", "gemma3_text", "stablelm"]
)
def test_offset_profiles_are_means_of_the_models_own_scores(opened, variant):
    """Every pair of vocabulary tokens, the query ``offset`` positions after the key, through the attention module itself."""
    network, model = opened(variant)
    layer, head, offset = 1, 1, 3
    x = model.source.attention_norm(layer)(model.W_E)
    n = len(x)
    rows = x.repeat(offset + 1, 1, 1).transpose(
        0, 1
    )  # each prompt is one token, repeated: its queries and keys at all positions
    _, got = run_reading(network, model, layer, rows)
    kv = head // (got["query"].shape[1] // got["key"].shape[1])
    scores = got["query"][:, head, offset] @ got["key"][:, kv, 0].T * got["scaling"]
    profile = offset_profile(model, f"{layer}.{head}", [offset])
    assert profile["mean"].item() == pytest.approx(float(scores.mean()), rel=1e-4, abs=1e-5 * float(scores.abs().max()))
    assert profile["same_token"].item() == pytest.approx(float(scores.diagonal().mean()), rel=1e-4)
    assert scores.shape == (n, n)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("variant", ["llama", "llama-yarn", "phi3-long", "granite"])
def test_query_key_pairs_are_the_models_own_scores(opened, variant, offset):
    """Rows of W_E as the attention's input, the query ``offset`` positions after the key; YaRN scales at every offset, 0 too."""
    network, model = opened(variant)
    rows = model.W_E.repeat(offset + 1, 1, 1).transpose(0, 1)
    _, got = run_reading(network, model, 1, rows)
    kv = 1 // (got["query"].shape[1] // got["key"].shape[1])
    scores = (got["query"][:, 1, offset] @ got["key"][:, kv, 0].T * got["scaling"]).double()
    pairs = largest_query_key_pairs(model, "1.1", 4, offset)
    ours = torch.tensor(pairs["value"].to_numpy())
    assert relative_error(ours, scores[pairs["query_id"].tolist(), pairs["key_id"].tolist()]) < CLOSE
    assert ours[0] == pytest.approx(float(scores.max()), rel=1e-4) and ours[4] == pytest.approx(
        float(scores.min()), rel=1e-4
    )


def test_layers_without_positions_have_no_offset_profile(opened):
    _, model = opened("smollm3")
    assert model.architecture.rotary_of(3) is None
    with pytest.raises(CircuitsError, match="no rotary positions in layer 3"):
        offset_profile(model, "3.0")
    near, far = (qk_spectra(model, offset).eigenvalues for offset in (0, 5))
    last = slice(3 * model.n_heads, None)
    assert torch.equal(near[last], far[last]) and not torch.allclose(near[: model.n_heads], far[: model.n_heads])


# -- in memory ----------------------------------------------------------------------------------------------------------------


def test_a_transformers_model_is_used_without_a_copy(pair):
    network, _ = pair
    model = ov.load(network)
    stored = {tensor.data_ptr() for tensor in network.state_dict().values()}
    for name in model.source.store.names():
        assert model.source.store.read(name).data_ptr() in stored
    assert model.source.network is network
    weights = ov.load(network, view="raw").layer(0)
    if model.source.family.projections["V"].part is None:  # a fused tensor's parts may be scattered in it
        assert weights.W_V.untyped_storage().data_ptr() in {
            t.untyped_storage().data_ptr() for t in network.state_dict().values()
        }


def test_a_state_dict_with_a_config_is_the_same_model(pair):
    network, right = pair
    for config in (network.config, network.config.to_dict()):
        model = ov.load(network.state_dict(), config=config, view="raw")
        assert torch.equal(model.layer(1).W_O, right.layer(1).W_O) and torch.equal(model.W_U, right.W_U)
    assert relative_error(model.trace(TOKENS).logits, right.trace(TOKENS).logits) < CLOSE


def test_half_precision_becomes_float32_when_a_layer_is_read():
    network = tiny("qwen3").to(torch.bfloat16)
    model = ov.load(network, view="raw")
    assert {model.source.store.dtype(name) for name in model.source.store.names()} == {"bfloat16"}
    assert model.layer(0).W_V.dtype == torch.float32
    assert torch.equal(model.layer(0).W_O.flatten(0, 1).T, network.model.layers[0].self_attn.o_proj.weight.float())
    assert network.dtype == torch.bfloat16
    certificate = model.verify()
    assert certificate.summary == "1 of 5 checks passed, 4 not possible"
    assert "runs in bfloat16" in certificate.checks[1].detail
    trace = model.trace(TOKENS)  # on the very network, in its own precision
    with torch.no_grad():
        assert torch.equal(trace.logits, network(torch.tensor([TOKENS]), use_cache=False).logits[0].float())


def test_a_plain_dictionary_of_attention_tensors():
    network = tiny("llama")
    tensors = {
        name: tensor for name, tensor in network.state_dict().items() if "mlp" not in name and "embed" not in name
    }
    model = ov.load(tensors, config=dict(network.config.to_dict()))
    assert model.head("1.3").ov.singular_values.shape == (8,)
    assert not model.can_run and not model.has_embeddings


def test_a_model_without_a_head_gives_its_weights():
    network = tiny("gpt2").transformer
    model = ov.load(network)
    assert model.source.network is None
    assert torch.equal(model.in_view("raw").W_U, network.wte.weight.T)
    with torch.no_grad():
        assert relative_error(model.trace(TOKENS).logits, tiny("gpt2")(torch.tensor([TOKENS])).logits[0]) < CLOSE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: ({"a": torch.ones(2)}, None), "give its config"),
        (lambda: ({}, None), "give its config"),
        (lambda: ({}, {"model_type": "llama"}), "no tensors"),
        (lambda: ({"a": 5}, {"model_type": "llama"}), "no tensors"),
        (lambda: ({"a": torch.ones(2)}, 5), "not a int"),
        (lambda: ({"a": torch.ones(2)}, {}), "not a dict"),
        (lambda: ({"a": torch.ones(2, device="meta")}, {"model_type": "llama"}), "'meta'"),
        (lambda: ("somewhere", {"model_type": "llama"}), "belongs to a dictionary of tensors"),
        (lambda: (torch.nn.Linear(2, 2), None), "cannot open a Linear"),
        (lambda: (tiny("gpt2").to("meta"), None), "'meta'"),
    ],
)
def test_what_cannot_be_used_from_memory_is_said(arguments, words):
    x, config = arguments()
    with pytest.raises(CircuitsError, match=words):
        ov.load(x, config=config)


@pytest.mark.parametrize(
    "base", [name for name in BASES if name not in ("gemma2", "bloom")]
)  # they have no fused attention
def test_a_model_in_fused_attention_that_trains_gives_its_patterns_and_is_put_back(base):
    right = tiny(base)
    network = tiny(base, implementation="sdpa")
    assert network.config._attn_implementation == "sdpa"
    network.train()
    trace = ov.load(network).trace(TOKENS)
    with torch.no_grad():
        found = right(torch.tensor([TOKENS]), output_attentions=True)
    assert relative_error(trace.logits, found.logits[0]) < CLOSE
    assert relative_error(trace.record.layers[1].pattern, found.attentions[1][0]) < CLOSE
    assert network.training and network.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_part_of_a_layers_heads_is_what_the_layer_has(variant):
    """What is read of a layer too large for memory: a group's heads, with every scale and gain of the family."""
    model = ov.load(tiny(variant))
    a = model.architecture
    heads = range(a.group_size, 2 * a.group_size) if a.n_kv_heads > 1 else range(1, 3)
    span = slice(heads.start, heads.stop)
    for view in ("raw", "folded"):
        whole, part = model.in_view(view).layer(1), model.in_view(view).layer_part(1, heads)
        for role in ("W_Q", "W_O", "b_Q"):
            found, right = getattr(part, role), getattr(whole, role)
            assert (found is None) == (right is None), role
            if found is not None:
                assert found.shape == right[span].shape and relative_error(found, right[span]) < 1e-6, role
        for circuit in ("ov", "qk"):
            found, right = getattr(part, circuit), getattr(whole, circuit)
            assert relative_error(found.left @ found.right, (right.left @ right.right)[span]) < 1e-6, circuit


def test_bigcode_does_not_read_what_gpt2_divides_by():
    """An entry that a config converted from GPT-2's may keep: its layers' scores are not divided by their number."""
    model = ov.load(tiny("gpt_bigcode", scale_attn_by_inverse_layer_idx=True))
    assert {check.name: check.passed for check in model.verify().checks}["query-key pattern"]


# -- a second oracle ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["gpt_neox", "qwen2", "gemma2", "opt", "phi3", "bloom"])
def test_heads_are_those_of_transformer_lens(opened, variant):
    """Its bridge splits the same modules by code of its own."""
    from conftest import _stand_in_tokenizer
    from transformer_lens.model_bridge import TransformerBridge

    _, model = opened(variant)
    bridge = TransformerBridge.boot_transformers(
        model.source.checkpoint.where,
        hf_model=tiny(variant),
        tokenizer=_stand_in_tokenizer(),
        dtype=torch.float32,
        device="cpu",
    )
    names = [f"blocks.{layer}.attn.hook_{part}" for layer in range(2) for part in ("z", "v", "pattern")]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.tensor([TOKENS]), names_filter=names)
    trace = model.trace(TOKENS)
    for layer in range(2):
        record = trace.record.layers[layer]
        assert relative_error(record.z, cache[f"blocks.{layer}.attn.hook_z"][0].transpose(0, 1)) < CLOSE
        assert relative_error(record.pattern, cache[f"blocks.{layer}.attn.hook_pattern"][0]) < CLOSE
        v = cache[f"blocks.{layer}.attn.hook_v"][0].transpose(0, 1)
        values = model.layer(layer).values(record.attention_input)
        assert (
            relative_error(model.layer(layer).per_query_head(values) if len(v) == model.n_heads else values, v) < CLOSE
        )
