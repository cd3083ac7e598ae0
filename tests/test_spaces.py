"""The map of heads and the spectrum's band, against the definitions worked out densely."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ov_circuits as ov
from ov_circuits import CircuitsError
from ov_circuits.scores.chance import spectrum
from ov_circuits.scores.spaces import principal_components, space_map, space_overlaps


def dense_projections(model, role):
    """P_a [d_model, d_model] of every head, from a float64 SVD of the head's own matrix."""
    found = []
    for head in model.heads():
        W = (head.W_O.T if role == "O" else head.W_V).double()
        U, _, _ = torch.linalg.svd(W, full_matrices=False)
        found.append(U @ U.T)
    return torch.stack(found)


@pytest.fixture(scope="module")
def story(stories260k):
    return ov.load(stories260k)


@pytest.mark.parametrize("role", ["O", "V"])
def test_overlaps_are_inner_products_of_projections(story, role):
    P = dense_projections(story, role).flatten(1)
    torch.testing.assert_close(space_overlaps(story, role), P @ P.T, rtol=1e-5, atol=1e-5)


def test_the_map_is_the_principal_component_analysis_of_the_projections(story):
    frame = space_map(story)
    for name, role in (("read", "V"), ("write", "O")):
        P = dense_projections(story, role).flatten(1)
        centred = (P - P.mean(0)).numpy()
        U, S, _ = np.linalg.svd(centred, full_matrices=False)
        assert frame.attrs["shares"][name] == pytest.approx((S**2 / (S**2).sum())[:2], rel=1e-4)
        for k, axis in enumerate("xy"):
            ours, expected = frame[f"{name}_{axis}"].to_numpy(), U[:, k] * S[k]
            expected = expected * np.sign(expected @ ours)
            assert ours == pytest.approx(expected, abs=1e-3)
            assert ours[np.abs(ours).argmax()] > 0


def test_heads_of_a_group_share_a_place_on_the_map_of_reads_alone(story):
    frame = space_map(story)
    first, second = frame.iloc[0], frame.iloc[1]
    assert first["kv_head"] == second["kv_head"]
    assert first["read_x"] == pytest.approx(second["read_x"], abs=1e-5)
    assert abs(first["write_x"] - second["write_x"]) > 1e-3


def test_a_broken_row_is_left_out_and_few_points_have_a_map():
    inner = torch.diag(torch.tensor([2.0, 3.0, torch.nan]))
    places, shares = principal_components(inner)
    assert places[2].isnan().all() and places[:2].isfinite().all()
    assert shares == pytest.approx((1.0, 0.0))  # two points lie on a line
    assert (places[0] - places[1]).norm() == pytest.approx(5**0.5)  # and their distance is kept
    one, _ = principal_components(torch.ones(1, 1))
    assert one.tolist() == [[0.0, 0.0]]


def test_heads_of_one_space_have_one_place_where_rounding_takes_them_for_more_than_alike():
    places, shares = principal_components(torch.tensor([[8, 8 + 1e-6], [8 + 1e-6, 8]]))
    assert places.tolist() == [[0, 0], [0, 0]] and shares == (0, 0)


def test_the_spectrums_band_keeps_the_factors_spectra_and_turns_what_is_between(story):
    head = story.head("2.5")
    frame = spectrum(head, draws=40, seed=1)
    dense = torch.linalg.svdvals(head.W_V.double() @ head.W_O.double())[: len(frame)]
    assert frame["value"].tolist() == pytest.approx(dense.tolist(), rel=1e-5)
    # The same null from its definition, with rotations drawn by another road.
    rng = np.random.default_rng(7)
    drawn = []
    for _ in range(400):
        Q, R = np.linalg.qr(rng.standard_normal((8, 8)))
        turned = head.W_V.double().numpy() @ (Q * np.sign(np.diag(R))) @ head.W_O.double().numpy()
        drawn.append(np.linalg.svd(turned, compute_uv=False)[:8])
    low, high = np.quantile(drawn, [0.1, 0.9], axis=0)
    # The range of 40 draws holds the middle 80 % of 400 others, and is not much wider than all of them.
    assert (frame["null_low"] <= low).all() and (frame["null_high"] >= high).all()
    spread = np.ptp(drawn, axis=0)
    assert (frame["null_high"] - frame["null_low"] <= 1.05 * spread).all()
    # Whatever the rotation, the product of all singular values is the same: |det W_V^T W_V| and |det W_O W_O^T| are kept.
    assert np.log(drawn).sum(1) == pytest.approx(float(dense.log().sum()), rel=1e-6)


def test_a_band_needs_draws(story):
    with pytest.raises(CircuitsError, match="at least 2"):
        spectrum(story.head("0.0"), draws=1)
