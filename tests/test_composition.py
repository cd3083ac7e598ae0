"""Composition and subspace overlap against dense float64 from the definition, the known circuits, and TransformerLens."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.linalg import pairwise
from ov_circuits.linalg.pairwise import gram_root, pairwise_energy
from ov_circuits.scores import composition as composition_module
from ov_circuits.scores.composition import (
    KINDS,
    component_composition,
    composition,
    compositions,
    strongest_paths,
    subspace_overlap,
)


def dense_circuits(reference, view):
    """OV and the three readers' circuits of every head, dense float64, by label."""
    circuits = {}
    for layer in range(reference.n_layers):
        gain, _ = reference.norm(layer)
        for head in range(reference.n_heads):
            kv = reference.kv_head(head)
            Q, K, V = (
                reference.view_reader(reference.reader(layer, role, index), gain, view)
                for role, index in (("Q", head), ("K", kv), ("V", kv))
            )
            ov_matrix = V @ reference.view_writer(reference.W_O(layer, head), view)
            circuits[f"{layer}.{head}"] = {"OV": ov_matrix, "Q": Q @ K.T, "K": K @ Q.T, "V": ov_matrix}
    return circuits


def norm(matrix):
    return float(matrix.square().sum().sqrt())


def views(model):
    return ("raw", "folded", "centred") if model.architecture.norm == "LayerNorm" else ("raw", "folded")


# -- the definition ---------------------------------------------------------------------------------------------------


def test_every_pair_is_the_dense_definition_in_every_view(any_folder, reference):
    if any_folder.name == "gpt2-small-attention":
        pytest.skip("its 144 dense heads have a test of their own")
    model = ov.load(any_folder)
    for view in views(model):
        dense = dense_circuits(reference(any_folder), view)
        found = compositions(model.in_view(view))
        for kind in KINDS:
            frame = found[kind].frame()
            layer = {label: int(label.split(".")[0]) for label in dense}
            assert len(frame) == sum(layer[a] < layer[b] for a in dense for b in dense)
            for row in frame.itertuples():
                A, B = dense[row.sender]["OV"], dense[row.receiver][kind]
                right = norm(A @ B) / (norm(A) * norm(B))
                assert row.value == pytest.approx(right, rel=1e-6), (view, kind, row.sender, row.receiver)


def test_the_rotation_null_has_the_dense_spectra(tiny_folder, reference):
    """Sums of fourth and sixth powers of singular values, of the circuits as full matrices."""
    model, ref = ov.load(tiny_folder).in_view("raw"), reference(tiny_folder)
    found = compositions(model)
    for place, head in enumerate(model.heads()):
        kv = ref.kv_head(head.index)
        Q, K, V = (ref.reader(head.layer, role, head.index if role == "Q" else kv) for role in "QKV")
        OV = V @ ref.W_O(head.layer, head.index)
        for kind, receiver in (("Q", Q @ K.T), ("K", K @ Q.T), ("V", OV)):
            for M, concentration, cubes in (
                (OV, found[kind].sender_concentration, found[kind].sender_cubes),
                (receiver, found[kind].receiver_concentration, found[kind].receiver_cubes),
            ):
                energy = torch.linalg.svdvals(M).square()
                energy = energy / energy.sum()
                assert float(concentration[place]) == pytest.approx(float(energy.square().sum()), rel=1e-5)
                assert float(cubes[place]) == pytest.approx(float(energy.pow(3).sum()), rel=1e-5)


@pytest.mark.slow
def test_gpt2_small_stays_within_a_millionth_of_dense_float64(gpt2_small_attention, reference):
    """Every sender into a sample of receivers, all kinds, and the pairs with the smallest values, where digits cancel."""
    dense = dense_circuits(reference(gpt2_small_attention), "centred")
    found = compositions(ov.load(gpt2_small_attention))
    for kind in KINDS:
        frame = found[kind].frame()
        sample = {*frame.value.nsmallest(60).index, *frame.value.nlargest(20).index, *frame.index[::97]}
        for row in frame.loc[sorted(sample)].itertuples():
            A, B = dense[row.sender]["OV"], dense[row.receiver][kind]
            assert row.value == pytest.approx(norm(A @ B) / (norm(A) * norm(B)), rel=1e-6)


def test_pairs_that_cancel_are_worked_out_again(monkeypatch):
    """Two matrices dominated by nearly orthogonal directions: the inner product of their squares loses all its digits."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 4, 200, generator=generator), torch.randn(5, 4, 200, generator=generator)
    common = torch.linalg.qr(torch.randn(200, 2, generator=generator)).Q
    left, right = left * 1e-4, right * 1e-4
    left[:, 0] += common[:, 0]
    right[:, 0] += common[:, 1]
    dense = (left.double()[:, None] @ right.double()[None].mT).square().sum((-1, -2))
    everything = [(slice(None), slice(None))]
    ours = pairwise_energy(left, right, everything)
    assert ((ours / dense).sqrt() - 1).abs().max() < 1e-6
    monkeypatch.setattr(pairwise, "_TILE_CANCELLATION", 1e30)
    tiles = ((pairwise_energy(left, right, everything) / dense) - 1).abs().max()
    monkeypatch.setattr(pairwise, "_CANCELLATION", 1e30)
    assert ((pairwise_energy(left, right, everything) / dense) - 1).abs().max() > tiles > 1e-6  # both guards are needed


@pytest.mark.parametrize("d", [1, 95, 96, 97, 200])
def test_pairwise_energy_computes_the_wanted_rectangles_only(d):
    generator = torch.Generator().manual_seed(d)
    left = torch.randn(4, 3, d, generator=generator, dtype=torch.float64)
    right = torch.randn(6, 2, d, generator=generator, dtype=torch.float64)
    dense = torch.einsum("srd,tqd->strq", left, right).square().sum((-1, -2))
    ours = pairwise_energy(left, right, [(slice(0, 2), slice(1, 6)), (slice(2, 3), slice(4, 6))])
    wanted = torch.zeros(4, 6, dtype=torch.bool)
    wanted[0:2, 1:6] = True
    wanted[2:3, 4:6] = True
    torch.testing.assert_close(ours, torch.where(wanted, dense, 0.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_gram_root_of_any_rank(rank):
    generator = torch.Generator().manual_seed(rank)
    W = (
        torch.randn(5, rank, generator=generator, dtype=torch.float64)
        @ torch.randn(rank, 9, generator=generator).double()
    )
    R = gram_root(W @ W.T)
    torch.testing.assert_close(R.T @ R, W @ W.T, rtol=0, atol=1e-10)


# -- the known circuits -----------------------------------------------------------------------------------------------


def test_gpt2_small_previous_token_head_composes_with_the_induction_heads(gpt2_small_attention):
    model = ov.load(gpt2_small_attention)
    assert model.view == "centred"
    frame = composition(model, kind="K")
    out = frame[frame.sender == "4.11"].sort_values("value", ascending=False)
    assert out.receiver.tolist()[:6] == ["6.9", "5.1", "5.5", "7.10", "5.0", "7.2"]
    assert out.value.round(3).tolist()[:6] == [0.103, 0.102, 0.097, 0.090, 0.089, 0.087]
    for receiver in ("5.5", "5.1", "6.9", "7.10"):
        into = frame[frame.receiver == receiver]
        assert into.loc[into.value.idxmax(), "sender"] == "4.11"


def test_tiny_gpt2_char_induction_circuit(tiny_gpt2_char):
    frame = composition(ov.load(tiny_gpt2_char), kind="K")
    from_previous = frame[frame.sender == "0.1"].value
    assert from_previous.between(0.149, 0.1605).all()
    assert frame[frame.sender != "0.1"].value.between(0.07, 0.125).all()
    paths = strongest_paths(ov.load(tiny_gpt2_char), n=4, kind="K")
    assert set(paths.sender) == {"0.1"}
    assert paths.z_paired.is_monotonic_decreasing


def test_agrees_with_transformer_lens(running_folder, bridge_of):
    bridge = bridge_of(running_folder)
    model = ov.load(running_folder, view="raw")
    found = compositions(model)
    n = model.n_layers * model.n_heads
    for kind in KINDS:
        theirs = bridge.all_composition_scores(kind).scores.detach().reshape(n, n)
        ours = torch.nan_to_num(found[kind].matrix)
        assert float((ours - theirs).abs().max()) < 2e-6


# -- frames and nulls -------------------------------------------------------------------------------------------------


def test_frame_says_what_it_is(tiny_folder):
    model = ov.load(tiny_folder)
    frame = composition(model, kind="all")
    assert list(frame.columns[:6]) == ["sender", "receiver", "kind", "value", "null_mean", "z"]
    assert set(frame.kind) == set(KINDS)
    assert frame.null_mean.iloc[0] == pytest.approx(model.architecture.d_model**-0.5)
    assert frame.attrs["view"] == model.view
    rotary = model.architecture.positions == "rotary"
    assert any("Rotary" in note for note in frame.attrs["notes"]) == rotary
    assert composition(model, kind="V").attrs["notes"] == []


def test_random_heads_are_not_flagged(write_tiny):
    """Gaussian weights: z-scores against both chance nulls are centred, of spread one, and hardly anything is flagged."""
    import safetensors.torch

    folder = write_tiny("gpt2", n_embd=64, n_head=8, n_layer=6, n_positions=8)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    state = {
        k: torch.randn(t.shape, generator=generator) if t.ndim == 2 else torch.zeros_like(t) for k, t in state.items()
    }
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    frame = composition(ov.load(folder, view="raw"), kind="all")
    for z in (frame.z, frame.z_isotropic):
        assert abs(z.mean()) < 0.1
        assert 0.85 < z.std() < 1.15
    assert frame.flag.mean() < 0.005
    assert 0.4 < frame.p.median() < 0.6


def test_unknown_kind_and_wrong_order(tiny_gpt2_char):
    model = ov.load(tiny_gpt2_char)
    with pytest.raises(CircuitsError, match="choose Q, K, V or all"):
        composition(model, kind="X")
    with pytest.raises(CircuitsError, match="earlier layer"):
        component_composition(model, "1.0", "0.1")
    with pytest.raises(CircuitsError, match="last layer"):
        component_composition(model, "1.0")
    with pytest.raises(CircuitsError, match="Q, K, V, O"):
        subspace_overlap(model, read="X")


def test_nan_stays_with_its_head_and_names_its_tensor(tiny_folders, tmp_path):
    import safetensors.torch

    folder = tmp_path / "broken"
    shutil.copytree(tiny_folders("llama-tied"), folder)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    state[name][8, 3] = torch.nan  # an output of head 0.1
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    broken, sound = composition(ov.load(folder), "all"), composition(ov.load(tiny_folders("llama-tied")), "all")
    hit = broken.sender == "0.1"
    assert broken[hit].value.isna().all()
    assert not broken[hit].flag.any()
    assert (broken[~hit].value == sound[~hit].value).all()
    assert any(name.removeprefix("model.") in note and "0.1" in note for note in broken.attrs["notes"])


# -- pieces and subspaces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_components_add_up_to_the_whole(any_folder, kind):
    model = ov.load(any_folder)
    sender, receiver = model.head(0, 1), model.head(1, 2)
    pieces = component_composition(model, sender.label, receiver.label, kind)
    whole = compositions(model, [kind])[kind].matrix[1, model.n_heads + 2]
    assert (pieces.energy * pieces.value**2).sum() == pytest.approx(float(whole) ** 2, rel=1e-5)
    assert pieces.share.sum() == pytest.approx(1)
    assert pieces.energy.sum() == pytest.approx(1)


def test_a_component_is_the_dense_rank_one_piece(tiny_gpt2_char, reference):
    dense = dense_circuits(reference(tiny_gpt2_char), "centred")
    U, S, Vh = torch.linalg.svd(dense["0.1"]["OV"])
    pieces = component_composition(ov.load(tiny_gpt2_char), "0.1", None, "K", n=12)
    assert len(pieces) == 12
    for row in pieces.itertuples():
        B = dense[row.receiver]["K"]
        piece = S[row.component] * U[:, row.component, None] @ Vh[None, row.component]
        assert row.value == pytest.approx(norm(piece @ B) / (norm(piece) * norm(B)), rel=1e-4)
        # x^T G x of a random unit vector x, tr G = 1: mean 1 / d, variance 2 (tr G^2 - 1 / d) / (d (d + 2)).
        d, G = len(B), B @ B.T / norm(B) ** 2
        std = (2 * (norm(G) ** 2 - 1 / d) / (d * (d + 2))) ** 0.5
        assert row.null_mean == pytest.approx(d**-0.5)
        assert row.z == pytest.approx((row.value**2 - 1 / d) / std, rel=1e-4)


@pytest.mark.parametrize("read", ["Q", "K", "V", "O"])
def test_subspace_overlap_is_that_of_the_projections(tiny_folder, reference, read):
    model, dense = ov.load(tiny_folder, view="raw"), reference(tiny_folder)
    frame = subspace_overlap(model, read=read)

    def projection(columns):
        return columns @ torch.linalg.pinv(columns)

    def space(label, role):
        layer, head = (int(part) for part in label.split("."))
        if role == "O":
            return projection(dense.W_O(layer, head).T)
        return projection(dense.reader(layer, role, head if role == "Q" else dense.kv_head(head)))

    for row in frame.itertuples():
        right = float((space(row.writer, "O") * space(row.reader, read)).sum())
        assert row.value == pytest.approx(right, rel=1e-5)
    n, heads = model.n_layers * model.n_heads, model.n_heads
    pairs = n * (n - 1) // 2 if read == "O" else sum(a // heads < b // heads for a in range(n) for b in range(n))
    assert len(frame) == pairs


def test_a_space_is_as_large_as_its_matrix_has_rank(tiny_folders, reference, tmp_path):
    """Three of the eight directions that head 1.0 reads with are sums of others: rounding is no direction."""
    folder = shutil.copytree(tiny_folders("gpt2-untied"), tmp_path / "dependent")
    tensors = load_file(folder / "model.safetensors")
    W_Q = tensors["transformer.h.1.attn.c_attn.weight"][:, :8]
    W_Q[:, 5:] = W_Q[:, :5] @ torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    dense, frame = reference(folder), subspace_overlap(ov.load(folder, view="raw"), read="Q")
    frame = frame[frame["reader"] == "1.0"]
    assert len(frame) == 4
    W = dense.reader(1, "Q", 0)
    reads = W @ torch.linalg.pinv(W, rtol=1e-5)
    for row in frame.itertuples():
        O = dense.W_O(0, int(row.writer[2:])).T  # noqa: E741
        right = float((O @ torch.linalg.pinv(O) * reads).sum())
        assert row.value == pytest.approx(right, rel=1e-5)
        assert row.share == pytest.approx(right / 5, rel=1e-5)
        assert row.null_mean == pytest.approx(5 * 8 / len(O))


# -- in bounded memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "room", [0, 3, 5, 8]
)  # layers' sides: one at a time, one and one, two and one, four and one or two
def test_layers_met_a_few_at_a_time_are_all_of_them(models_dir, monkeypatch, room, assert_close):
    model = ov.load(models_dir / "stories260k")
    a = model.architecture
    assert a.n_layers * 2 > 8
    whole, overlap, writers = compositions(model), subspace_overlap(model), subspace_overlap(model, read="O")
    held, sides = [0], composition_module._sides

    def watched(*args):
        found, notes = sides(*args)
        held[0] = max(held[0], sum(math.prod(side.factors.shape[:2]) for side in found))
        return found, notes

    monkeypatch.setattr(composition_module, "_sides", watched)
    monkeypatch.setattr(composition_module, "FACTOR_BYTES", room * 4 * a.n_heads * a.d_head * a.d_model)
    parts = compositions(model)
    for kind in KINDS:
        assert_close(parts[kind].matrix.nan_to_num(-1), whole[kind].matrix.nan_to_num(-1), 1e-6)
        assert torch.equal(parts[kind].sender_concentration, whole[kind].sender_concentration)
        assert torch.equal(parts[kind].receiver_concentration, whole[kind].receiver_concentration)
    assert held[0] <= max(3, room // 2)
    for found, right in ((subspace_overlap(model), overlap), (subspace_overlap(model, read="O"), writers)):
        assert found[["writer", "reader"]].equals(right[["writer", "reader"]])
        assert_close(torch.tensor(found["value"].to_numpy()), torch.tensor(right["value"].to_numpy()), 1e-6)


def test_notes_on_broken_tensors_are_said_once_in_parts(models_dir, tmp_path, monkeypatch):
    folder = tmp_path / "broken"
    shutil.copytree(models_dir / "stories260k", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.self_attn.v_proj.weight"][0, 0] = torch.nan
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    whole = composition(ov.load(folder), "all").attrs["notes"]
    monkeypatch.setattr(composition_module, "FACTOR_BYTES", 0)
    assert composition(ov.load(folder), "all").attrs["notes"] == whole
    assert sum("holds NaN" in note for note in whole) == 2
