"""Shapes are checked in tests only: diffmh is imported here with its jaxtyping annotations run by beartype."""

from jaxtyping import install_import_hook

with install_import_hook("diffmh", "beartype.beartype"):
    import diffmh  # noqa: F401
