"""QK spectra, query-key pairs, position patterns and offset profiles against float64 from the definition."""

from __future__ import annotations

import math

import pytest
import torch

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.scores.qk import largest_query_key_pairs, offset_profile, position_pattern, qk_spectra


def rotation(d_head, offset, theta):
    """R with q R the query turned by ``offset`` positions: pairs (i, i + d_head / 2), built entry by entry."""
    R, half = torch.zeros(d_head, d_head, dtype=torch.float64), d_head // 2
    for i in range(half):
        angle = offset * theta ** (-2 * i / d_head)
        R[i, i] = R[i + half, i + half] = math.cos(angle)
        R[i, i + half], R[i + half, i] = math.sin(angle), -math.sin(angle)
    return R


def dense_qk(reference, model, layer, head, offset=0):
    Q, K = reference.reader(layer, "Q", head), reference.reader(layer, "K", reference.kv_head(head))
    theta = model.architecture.rope_theta
    R = torch.eye(reference.d_head, dtype=torch.float64) if theta is None else rotation(reference.d_head, offset, theta)
    return Q @ R @ K.T * model.architecture.score_scale(layer)


def offsets_of(model):
    return (0, 1, 5) if model.architecture.positions == "rotary" else (0,)


def test_spectra_are_those_of_the_dense_matrices(any_folder, reference, assert_close):
    model, dense = ov.load(any_folder, view="raw"), reference(any_folder)
    for offset in offsets_of(model):
        found = qk_spectra(model, offset)
        frame = found.frame().set_index("head")
        assert frame.index.tolist() == model.head_labels
        for layer, head in {(0, 0), (model.n_layers - 1, model.n_heads - 1), (0, model.n_heads - 2)}:
            M = dense_qk(dense, model, layer, head, offset)
            S = torch.linalg.svdvals(M)
            row = layer * model.n_heads + head
            k = found.singular_values.shape[1]
            assert_close(found.singular_values[row], S[:k])
            assert float(S[k:].sum()) < 1e-9 * float(S[0])
            traces = [torch.linalg.matrix_power(M, power).trace() for power in (1, 2, 3)]
            for power, trace in enumerate(traces, 1):
                ours = (found.eigenvalues[row] ** power).sum()
                assert abs(complex(ours) - float(trace)) < 1e-5 * float(S[0]) ** power
            numbers = frame.loc[f"{layer}.{head}"]
            assert numbers.qk_frobenius_norm == pytest.approx(float(M.norm()), rel=1e-6)
            assert numbers.qk_stable_rank == pytest.approx(float((M.norm() / S[0]) ** 2), rel=1e-5)
            values = torch.linalg.eigvals(M)
            if model.architecture.d_head < model.architecture.d_model:
                score = float(values.sum().real / values.abs().sum())
                assert numbers.qk_eigen_matching == pytest.approx(score, abs=1e-4)


def test_query_key_pairs_are_those_of_the_dense_matrix(running_folder, reference):
    model, dense = ov.load(running_folder, view="raw"), reference(running_folder)
    layer, head = model.n_layers - 1, 1
    for offset in offsets_of(model):
        M = dense.W_E @ dense_qk(dense, model, layer, head, offset) @ dense.W_E.T
        frame = largest_query_key_pairs(model, f"{layer}.{head}", k=6, offset=offset)
        scale = float(M.abs().max())
        for end, largest in (("positive", True), ("negative", False)):
            part = frame[frame.end == end]
            right = M.flatten().topk(6, largest=largest).values.tolist()
            assert part.value.tolist() == pytest.approx(right, abs=1e-5 * scale)
            assert part.value.tolist() == pytest.approx(
                M[part.query_id.tolist(), part.key_id.tolist()].tolist(), abs=1e-5 * scale
            )
        assert frame.attrs["offset"] == (offset if model.architecture.positions == "rotary" else None)


def position_only_pattern(reference, model, layer, head):
    """Rows of W_pos through the layer's own LayerNorm, then the attention's formula, float64."""
    gain, bias = reference.norm(layer)
    positions = reference.tensors["wpe.weight"]
    x = torch.nn.functional.layer_norm(positions, positions.shape[1:], gain, bias, model.architecture.norm_eps)
    q = x @ reference.reader(layer, "Q", head) + reference.bias(layer, "Q", head)
    k = x @ reference.reader(layer, "K", head) + reference.bias(layer, "K", head)
    scores = q @ k.T * model.architecture.score_scale(layer)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


@pytest.mark.parametrize("view", ["raw", "folded", "centred"])
@pytest.mark.parametrize("name", ["tiny-gpt2-char", "gpt-nano-sort", "gpt2-small-attention"])
def test_position_pattern_is_attention_on_positions_alone_in_every_view(
    models_dir, reference, assert_close, name, view
):
    model = ov.load(models_dir / name, view=view)
    layer, head = model.n_layers - 1, 1
    right = position_only_pattern(reference(models_dir / name), model, layer, head)
    assert_close(position_pattern(model, f"{layer}.{head}"), right, 1e-5)


def test_position_pattern_of_biases_and_scales(tiny_folders, reference, assert_close):
    for name in ("gpt2-tied", "gpt2-scaled-by-layer", "gpt2-unscaled"):
        model = ov.load(tiny_folders(name))
        pattern = position_pattern(model, "1.2")
        assert_close(pattern, position_only_pattern(reference(tiny_folders(name)), model, 1, 2), 1e-4)
        assert_close(pattern.sum(-1), torch.ones(len(pattern)), 1e-12)


def test_the_previous_token_head_shows_in_positions_alone(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    stripe = {
        label: float(position_pattern(model, label).diagonal(-1).mean()) for label in ("0.0", "0.1", "0.2", "0.3")
    }
    assert max(stripe, key=stripe.get) == "0.1"
    assert stripe["0.1"] > 0.9


def test_rotary_models_have_an_offset_profile_instead(stories260k):
    model = ov.load(stories260k)
    with pytest.raises(CircuitsError, match="use offset_profile"):
        position_pattern(model, "3.6")
    profile = offset_profile(model, "3.6", range(12))
    assert profile.loc[profile["mean"].idxmax(), "offset"] == 1  # its strongest previous-token head


def test_offset_profile_is_the_mean_over_the_vocabulary(tiny_folders, reference):
    for name in ("llama-grouped", "llama-wide-heads"):
        model, dense = ov.load(tiny_folders(name)), reference(tiny_folders(name))
        layer, head = 1, 3
        gain, _ = dense.norm(layer)
        x = dense.W_E / (dense.W_E.square().mean(-1, keepdim=True) + model.architecture.norm_eps).sqrt() * gain
        q, k = x @ dense.reader(layer, "Q", head), x @ dense.reader(layer, "K", dense.kv_head(head))
        if dense.bias(layer, "Q", head) is not None:
            q, k = q + dense.bias(layer, "Q", head), k + dense.bias(layer, "K", dense.kv_head(head))
        for row in offset_profile(model, f"{layer}.{head}", (0, 1, 7)).itertuples():
            scores = q @ rotation(dense.d_head, row.offset, model.architecture.rope_theta) @ k.T
            scores = scores * model.architecture.score_scale(layer)
            assert row.mean == pytest.approx(float(scores.mean()), rel=1e-5, abs=1e-6)
            assert row.same_token == pytest.approx(float(scores.diagonal().mean()), rel=1e-5, abs=1e-6)


def test_refusals(tiny_gpt2_char, stories260k, gpt2_small_attention):
    with pytest.raises(CircuitsError, match="does not depend on an offset"):
        qk_spectra(ov.load(tiny_gpt2_char), offset=1)
    with pytest.raises(CircuitsError, match="no rotary positions"):
        offset_profile(ov.load(tiny_gpt2_char), "0.0")
    with pytest.raises(CircuitsError, match="cannot be -1"):
        qk_spectra(ov.load(stories260k), offset=-1)
    with pytest.raises(CircuitsError, match="no embeddings"):
        largest_query_key_pairs(ov.load(gpt2_small_attention), "0.0")


def test_nan_stays_with_its_heads(write_tiny):
    import safetensors.torch

    folder = write_tiny("llama", seed=4)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state["model.layers.1.self_attn.q_proj.weight"][0, 0] = torch.inf
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = ov.load(folder)
    frame = qk_spectra(model).frame()
    broken = frame["head"] == "1.0"
    assert frame.drop(columns="head")[broken].isna().all(axis=None)
    assert frame[~broken].notna().all(axis=None)
    assert any("layers.1.self_attn.q_proj.weight" in note for note in frame.attrs["notes"])


def test_nulls_at_an_offset_are_those_of_dense_random_rotations(stories260k):
    model = ov.load(stories260k)
    head, d = model.head("2.5"), model.architecture.d_head
    Q, K = head.W_Q.double(), head.W_K.double()
    generator = torch.Generator().manual_seed(5)

    def haar(n: int) -> torch.Tensor:
        q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        return q * r.diagonal().sign()

    turned = [torch.linalg.svdvals(Q @ haar(d) @ K.T)[:d] * d**-0.5 for _ in range(400)]
    S = torch.linalg.svdvals(Q @ rotation(d, 3, model.architecture.rope_theta) @ K.T)[:d]
    M = [haar(64)[:, :d] @ torch.diag(S) @ haar(64)[:d] for _ in range(400)]
    right = {
        "qk_spectral_norm": torch.stack([s[0] for s in turned]),
        "qk_entropy_rank": torch.stack([torch.exp(-(s / s.sum() * (s / s.sum()).log()).sum()) for s in turned]),
        "qk_eigen_matching": torch.stack([(e := torch.linalg.eigvals(m)).real.sum() / e.abs().sum() for m in M]),
    }
    many = [qk_spectra(model, 3, seed).nulls for seed in range(12)]
    for name, values in right.items():
        mean = torch.stack([nulls[name].mean[21] for nulls in many]).mean()
        std = torch.stack([nulls[name].std[21] for nulls in many]).square().mean().sqrt()
        assert abs(float(mean - values.mean())) < 0.5 * float(values.std()), name
        assert float(std) == pytest.approx(float(values.std()), rel=0.25), name
    frame = qk_spectra(model, 3).frame().set_index("head")
    assert {f"{name}{suffix}" for name in right for suffix in ("_null_mean", "_z")} <= set(frame.columns)
