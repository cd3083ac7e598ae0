"""The certificate passes on every real and random checkpoint and fails when the split is corrupted in any known way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import hf_model

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.certificate import verify
from ov_circuits.model import Layer
from ov_circuits.source import Source


def failed(certificate):
    return {check.name for check in certificate.checks if check.passed is False}


def test_every_checkpoint_that_can_run_passes_all_five_checks(running_folder):
    certificate = ov.load(running_folder).verify()
    assert certificate.passed, certificate.frame().to_string()
    assert [check.passed for check in certificate.checks] == [True] * 5
    assert certificate.summary == "5 of 5 checks passed"
    assert all(check.value <= check.limit for check in certificate.checks)


def test_what_cannot_be_checked_is_said_and_not_counted_as_passed(gpt2_small_attention):
    certificate = ov.load(gpt2_small_attention).verify()
    assert [check.passed for check in certificate.checks] == [True, None, None, None, None]
    assert certificate.summary == "1 of 5 checks passed, 4 not possible"
    assert "wte.weight" in certificate.checks[1].detail


def corrupt(monkeypatch, change):
    """Let every layer that is read pass through ``change`` (the model that runs is left alone)."""
    read = Source.read_layer
    monkeypatch.setattr(Source, "read_layer", lambda self, *asked: change(read(self, *asked)))


def replace(**changes):
    return lambda layer: dataclasses.replace(layer, **{name: change(layer) for name, change in changes.items()})


def wrong_axis(layer):
    """A square W_O split along the columns instead of the rows."""
    n, d_head, d_model = layer.W_O.shape
    full = layer.W_O.reshape(n * d_head, d_model)
    return full.T.reshape(n, d_head, d_model)


CORRUPTIONS = {
    "W_O split on the wrong axis": (replace(W_O=wrong_axis), {"sum of heads", "one token", "ledger"}),
    "heads of W_O in another order": (replace(W_O=lambda x: x.W_O.flip(0)), {"sum of heads", "one token", "ledger"}),
    "values of another head": (replace(W_V=lambda x: x.W_V.roll(1, 0)), {"one token"}),
    "keys of another head": (replace(W_K=lambda x: x.W_K.roll(1, 0)), {"query-key pattern"}),
    "rotary rows permuted": (
        replace(W_Q=lambda x: x.W_Q.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)),
        {"query-key pattern"},
    ),
    "values a thousandth too large": (replace(W_V=lambda x: 1.001 * x.W_V), {"one token"}),
    "W_O a thousandth too large": (replace(W_O=lambda x: 1.001 * x.W_O), {"sum of heads", "one token"}),
    "queries a hundredth too large": (replace(W_Q=lambda x: 1.01 * x.W_Q), {"query-key pattern"}),
    "score scale forgotten": (replace(score_scale=lambda x: 1.0), {"query-key pattern"}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("folder", ["tiny-gpt2-char", "stories260k"])
def test_a_corrupted_split_is_caught(models_dir, monkeypatch, folder, name):
    change, expected = CORRUPTIONS[name]
    corrupt(monkeypatch, change)
    certificate = ov.load(models_dir / folder).verify()
    assert not certificate.passed
    assert failed(certificate) >= expected


def test_a_tiled_group_map_is_caught(stories260k, monkeypatch):
    """Query heads given the groups in turn (tile) instead of in blocks (repeat_interleave)."""

    def tile(layer, tensor):
        return tensor.repeat(layer.W_Q.shape[0] // tensor.shape[0], *[1] * (tensor.ndim - 1))

    monkeypatch.setattr(Layer, "per_query_head", tile)
    assert {"one token", "query-key pattern"} <= failed(ov.load(stories260k).verify())


@pytest.mark.parametrize(("bias", "caught"), [
    ("b_V", "one token"), ("b_O", "sum of heads"), ("b_Q", "query-key pattern"),
])  # fmt: skip
def test_a_forgotten_bias_is_caught(tiny_folders, monkeypatch, bias, caught):
    corrupt(monkeypatch, replace(**{bias: lambda layer: None}))
    assert caught in failed(ov.load(tiny_folders("gpt2-untied")).verify())


def test_a_value_bias_counted_twice_is_caught(tiny_folders, monkeypatch):
    corrupt(monkeypatch, replace(b_V=lambda layer: 2 * layer.b_V))
    assert "one token" in failed(ov.load(tiny_folders("gpt2-untied")).verify())


def test_a_forgotten_final_gain_is_caught(stories260k, monkeypatch):
    norm = Source.final_norm.func
    ones = torch.ones(64)
    monkeypatch.setattr(Source, "final_norm", property(lambda self: dataclasses.replace(norm(self), gain=ones)))
    assert "ledger" in failed(ov.load(stories260k).verify())


def test_weights_that_are_no_numbers_fail(stories260k, monkeypatch):
    corrupt(monkeypatch, replace(W_O=lambda layer: layer.W_O * torch.nan))
    assert {"sum of heads", "one token"} <= failed(ov.load(stories260k).verify())


def test_spectra_are_looked_at_in_the_last_layer_too(stories260k, monkeypatch):
    corrupt(monkeypatch, lambda layer: replace(W_V=lambda x: x.W_V * torch.nan)(layer) if layer.index == 4 else layer)
    spectra = ov.load(stories260k).verify().checks[0]
    assert spectra.passed is False and "of head 4." in spectra.detail


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_proves_nothing(stories260k, dtype):
    model = ov.load(hf_model(stories260k).to(dtype))
    assert [check.passed for check in model.verify().checks] == [True, None, None, None, None]
    with pytest.raises(CircuitsError, match="give it in float32"):
        verify(model, [1, 2])


def test_the_frame_has_a_row_a_check(stories260k):
    certificate = ov.load(stories260k).verify()
    assert list(certificate.frame().columns) == ["name", "passed", "value", "limit", "detail"]
    assert len(certificate.frame()) == 5
