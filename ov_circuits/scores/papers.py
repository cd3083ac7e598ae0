"""Where definitions come from, as results say it."""

from __future__ import annotations

ELHAGE = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits"
MCDOUGALL = "rank of a token in its own row, over the full vocabulary, as in McDougall et al. 2023, Copy Suppression"
WANG = "Wang et al. 2022, Interpretability in the Wild"
MAPS = "Elhelou & Geva 2025, Inferring Functionality of Attention Heads from their Parameters"
MILLIDGE = (
    "Millidge & Black 2022, The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable"
)
MERULLO = "Merullo et al. 2024, Talking Heads: Understanding Inter-layer Communication in Transformer Language Models"
ROFORMER = "Su et al. 2021, RoFormer"
TORGERSON = "principal components of projections (Torgerson 1952)"
SUBSPACES = "||U^T V||_F^2 of orthonormal bases, beside random subspaces (James 1964)"
