"""Nulls of the scoreboard against brute force: dense random rotations in full dimension, many draws."""

from __future__ import annotations

import pytest
import torch

import ov_circuits as ov
from ov_circuits.scores.board import SCORES, LayerCircuits
from ov_circuits.scores.chance import Draws, LayerDraws


def haar(n, generator):
    Q, R = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return Q * R.diagonal().sign()


def copying(matrix):
    eigenvalues = torch.linalg.eigvals(matrix)
    return float(eigenvalues.real.sum() / eigenvalues.abs().sum())


@pytest.fixture(scope="module")
def many(stories260k):
    """400 draws for a layer of a real model, and the same number of dense ones for its head 5."""
    model = ov.load(stories260k)
    circuits = LayerCircuits(model, 2)
    chance = LayerDraws(Draws(model, draws=400), circuits.weights, circuits.ov, circuits.qk)
    return model, circuits, chance


def dense_draws(model, head, n=400):
    generator = torch.Generator().manual_seed(99)
    W_V, W_O, W_Q, W_K = (getattr(head, name).double() for name in ("W_V", "W_O", "W_Q", "W_K"))
    S = torch.zeros(W_V.shape[0], dtype=torch.float64)
    S[: W_V.shape[1]] = torch.linalg.svdvals(W_V @ W_O)[: W_V.shape[1]]
    E, U = model.W_E.double(), model.W_U.double()
    drawn = {key: [] for key in ("ov_frobenius_norm", "qk_frobenius_norm", "eigen_copying_ov", "eigen_copying_full")}
    drawn["full_ov_frobenius_norm"] = []
    for _ in range(n):
        R = haar(W_V.shape[1], generator)
        drawn["ov_frobenius_norm"].append(float((W_V @ R @ W_O).norm()))
        drawn["qk_frobenius_norm"].append(float((W_Q @ R @ W_K.T).norm() * model.architecture.d_head**-0.5))
        M = haar(len(S), generator) @ torch.diag(S) @ haar(len(S), generator).T
        drawn["eigen_copying_ov"].append(copying(M))
        drawn["full_ov_frobenius_norm"].append(float((E @ M @ U).norm()))
        drawn["eigen_copying_full"].append(copying(M @ (U @ E)))  # the non-zero eigenvalues of E M U, 64 instead of 512
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in drawn.items()}


def test_nulls_are_those_of_dense_random_rotations(many):
    model, circuits, chance = many
    head = model.head("2.5")
    for key, values in dense_draws(model, head).items():
        score = SCORES[key]
        if isinstance(score.null, str):
            null = chance.null(score.null, score.compute, odd=score.diverging)
        else:
            null = score.null(circuits, 0)
        error = values.std() / len(values) ** 0.5
        assert abs(null.mean[5] - values.mean()) < 6 * error, key
        assert null.std[5] == pytest.approx(float(values.std()), rel=0.2), key


def test_rotations_are_haar(many):
    """Every entry has mean 0 and variance 1/d; a QR factor as it comes has its signs the one way."""
    drawn = torch.stack(many[2]._draws.inside)
    n, d, _ = drawn.shape
    assert torch.allclose(drawn @ drawn.mT, torch.eye(d, dtype=torch.float64), atol=1e-12)
    assert float(drawn.mean(0).abs().max()) < 5 / (n * d) ** 0.5
    assert float((drawn.square().mean(0) * d - 1).abs().max()) < 5 * (2 / n) ** 0.5


def test_turned_factors_keep_their_own_spectra(many):
    """The product of singular values, |det|, does not depend on how the factors meet."""
    _, circuits, chance = many
    factors = [torch.linalg.svdvals(part.double()).prod(-1) for part in (circuits.ov.left, circuits.ov.right)]
    for turned in chance._factors[:5]:
        assert torch.allclose(turned.ov.singular_values.prod(-1), factors[0] * factors[1])


def test_a_turned_value_bias_is_what_the_turned_head_writes_of_it(tiny_folders):
    circuits = LayerCircuits(ov.load(tiny_folders("gpt2-untied")), 1)
    chance = LayerDraws(Draws(circuits.model, draws=2), circuits.weights, circuits.ov, circuits.qk)
    layer = circuits.weights
    for R, turned in zip(chance._draws.inside, chance._factors, strict=True):
        right = torch.stack([(b @ R @ W).norm() for b, W in zip(layer.b_V.double(), layer.W_O.double(), strict=True)])
        torch.testing.assert_close(turned.value_bias, right, rtol=1e-6, atol=0)


def test_the_spread_of_an_odd_score_is_about_zero(many):
    """Its mean over draws is known: what the draws are off by is spread, too."""
    null = many[2].null("factors", lambda chance: torch.full((8,), 3.0), odd=True)
    assert null.mean.tolist() == [0] * 8 and null.std.tolist() == [3] * 8


def test_the_board_carries_null_mean_and_z_for_every_score_and_a_seed_fixes_them(stories260k):
    model = ov.load(stories260k)
    board = ov.scoreboard(model, tokens=0)
    for key in (key for key in SCORES if key in board):
        assert {f"{key}_null_mean", f"{key}_z"} <= set(board.columns)
        assert key in board.attrs["nulls"]
    assert ov.scoreboard(model, tokens=0).equals(board)
    other = ov.scoreboard(model, tokens=0, seed=1)
    assert not other["ov_frobenius_norm_null_mean"].equals(board["ov_frobenius_norm_null_mean"])
    assert other["ov_frobenius_norm"].equals(board["ov_frobenius_norm"])


def test_random_heads_do_not_stand_out_and_induction_heads_do(tiny_folders, tiny_gpt2_char):
    random = ov.scoreboard(ov.load(tiny_folders("gpt2-untied")), ["eigen_copying_full", "ov_frobenius_norm"])
    assert random["eigen_copying_full_z"].abs().max() < 5
    assert random["ov_frobenius_norm_z"].abs().max() < 6
    trained = ov.scoreboard(ov.load(tiny_gpt2_char), ["eigen_copying_full"]).set_index("head")["eigen_copying_full_z"]
    assert trained["1.0":"1.3"].min() > 8
