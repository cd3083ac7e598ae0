"""A package, so that this folder's conftest does not stand in for the one above it."""
