"""pallas_call compiles natively for every test of this folder."""

import pytest

import pbkern.pallas


@pytest.fixture(autouse=True, scope="package")
def native():
    with pbkern.pallas.installed():
        yield
