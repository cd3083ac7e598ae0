"""Matrices: products that are never formed. Knows nothing of models or files."""
