"""Two checkpoints head by head, against dense matrices; no change is none, and one changed head is found."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.cli import app
from ov_circuits.scores.compare import _spaces


@pytest.fixture
def changed(tiny_folders, tmp_path):
    """``changed(name, edit)`` -> a copy of a tiny model with ``edit(tensors)`` done to it."""

    def make(name, edit):
        folder = tmp_path / "changed"
        shutil.copytree(tiny_folders(name), folder)
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


def noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["gpt2-untied", "llama-grouped", "llama-wide-heads"])
def test_a_model_against_itself_has_not_changed(tiny_folders, name):
    frame = ov.compare(ov.load(tiny_folders(name)), ov.load(tiny_folders(name)))
    assert list(frame["head"]) == ov.load(tiny_folders(name)).head_labels
    for column in ("ov_change", "qk_change", "write_angle", "read_angle", "eigen_copying_full_change"):
        assert frame[column].abs().max() < 1e-6, column
    for column in ("ov_cosine", "qk_cosine", "ov_norm_ratio", "write_overlap", "read_overlap"):
        assert (frame[column] - 1).abs().max() < 1e-12, column


@pytest.mark.parametrize("view", ["raw", "folded"])
def test_every_column_is_that_of_the_dense_matrices(tiny_folders, changed, reference, view):
    def edit(tensors):
        for i, name in enumerate(sorted(tensors)):
            if "attn" in name and name.endswith("weight"):
                tensors[name] += 0.1 * noise(tensors[name].shape, i)

    base, other = tiny_folders("llama-grouped"), changed("llama-grouped", edit)
    frame = ov.compare(ov.load(base, view=view), ov.load(other, view=view)).set_index("head")
    refs = [reference(base), reference(other)]
    for layer in range(2):
        for head in range(4):
            row, W_O = frame.loc[f"{layer}.{head}"], [ref.W_O(layer, head) for ref in refs]

            def read(role, ref, layer=layer, head=head):
                index = head if role == "Q" else ref.kv_head(head)
                return ref.view_reader(ref.reader(layer, role, index), ref.norm(layer)[0], view)

            OV = [read("V", ref) @ w for ref, w in zip(refs, W_O, strict=True)]
            QK = [read("Q", ref) @ read("K", ref).T for ref in refs]
            for kind, (A, B) in (("ov", OV), ("qk", QK)):
                assert row[f"{kind}_change"] == pytest.approx(float((B - A).norm() / A.norm()), rel=1e-5)
                assert row[f"{kind}_cosine"] == pytest.approx(float((A * B).sum() / A.norm() / B.norm()), rel=1e-5)
            assert row["ov_norm_ratio"] == pytest.approx(float(OV[1].norm() / OV[0].norm()), rel=1e-5)
            projectors = [torch.linalg.pinv(w) @ w for w in W_O]
            overlap = float((projectors[0] * projectors[1]).sum()) / 8
            assert row["write_overlap"] == pytest.approx(overlap, rel=1e-5)
            gap = float(torch.linalg.matrix_norm(projectors[0] - projectors[1], ord=2))  # sine of the largest angle
            assert torch.sin(torch.deg2rad(torch.tensor(row["write_angle"]))) == pytest.approx(gap, rel=1e-5)
            copying = []
            for ref, A in zip(refs, OV, strict=True):
                unembed = ref.view_reader(ref.W_U, ref.final_norm()[0], view)
                values = torch.linalg.eigvals(ref.W_E @ A @ unembed)
                copying.append(float(values.real.sum() / values.abs().sum()))
            assert row["eigen_copying_full_a"] == pytest.approx(copying[0], abs=1e-6)
            assert row["eigen_copying_full_change"] == pytest.approx(copying[1] - copying[0], abs=1e-6)


def test_a_change_of_one_head_is_that_heads_alone_and_another_basis_inside_a_head_is_none(tiny_folders, changed):
    def edit(tensors):
        W_O = tensors["transformer.h.1.attn.c_proj.weight"]  # (in, out): rows by head
        W_O[16:24] += 1e-4 * noise((8, 32))
        fused, bias = tensors["transformer.h.0.attn.c_attn.weight"], tensors["transformer.h.0.attn.c_attn.bias"]
        turn = torch.linalg.qr(noise((8, 8))).Q  # head 0.1: W_V turned, W_O turned back
        fused[:, 72:80], bias[72:80] = fused[:, 72:80] @ turn, bias[72:80] @ turn
        tensors["transformer.h.0.attn.c_proj.weight"][8:16] = (
            turn.T @ tensors["transformer.h.0.attn.c_proj.weight"][8:16]
        )

    frame = ov.compare(ov.load(tiny_folders("gpt2-untied")), ov.load(changed("gpt2-untied", edit))).set_index("head")
    assert frame["ov_change"].idxmax() == "1.2" and 1e-5 < frame.loc["1.2", "ov_change"] < 1e-2
    assert frame["ov_change"].drop("1.2").max() < 1e-6
    assert frame.loc["1.2", "write_angle"] > 1e-4 > frame["write_angle"].drop("1.2").max()


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 1.0])
def test_small_angles_between_spaces_keep_their_digits(angle):
    a = torch.tensor([[[1.0], [0.0], [0.0]]], dtype=torch.float64)
    b = torch.tensor([[[math.cos(angle)], [math.sin(angle)], [0.0]]], dtype=torch.float64)
    found, overlap = _spaces(a, b)
    assert float(found) == pytest.approx(math.degrees(angle), rel=1e-9)
    assert float(overlap) == pytest.approx(math.cos(angle) ** 2)


def test_models_that_cannot_be_compared_are_said(tiny_folders, stories260k):
    base = ov.load(tiny_folders("llama-grouped"))
    with pytest.raises(CircuitsError, match="layers 2 and 5"):
        ov.compare(base, ov.load(stories260k))
    with pytest.raises(CircuitsError, match="same view"):
        ov.compare(base, base.in_view("raw"))


def test_a_broken_head_has_no_numbers_and_the_others_stand(tiny_folders, changed):
    def edit(tensors):
        tensors["model.layers.1.self_attn.o_proj.weight"][:, 3] = float("nan")  # head 1.0

    frame = ov.compare(ov.load(tiny_folders("llama-grouped")), ov.load(changed("llama-grouped", edit))).set_index(
        "head"
    )
    assert frame.loc["1.0"].drop(["layer", "index"]).isna().all()
    assert frame.drop("1.0").notna().all().all()


def test_the_command(tiny_folders, tmp_path):
    folder, file = str(tiny_folders("gpt2-tied")), tmp_path / "changes.json"
    result = CliRunner().invoke(app, ["compare", folder, folder, "-o", str(file)])
    assert result.exit_code == 0 and len(json.loads(file.read_text())) > 0
    printed = CliRunner().invoke(app, ["compare", folder, folder, "--top", "3"])
    assert printed.exit_code == 0 and "OV change" in printed.stdout
    refused = CliRunner().invoke(app, ["compare", folder, folder, "--sort", "ov_chang"])
    assert refused.exit_code == 2 and "ov_change" in refused.stderr
