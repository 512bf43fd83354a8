import pytest

from diffmh.sad.plan import forget_plans


@pytest.fixture(autouse=True)
def no_plans():
    """A deliberate mistake is seen by plans that are made after it, and by no later test."""
    forget_plans()
