"""Each test begins with nothing captured."""

import logging

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nothing_captured():
    logging.getLogger("torch.__trace").disabled = True  # pytest would keep every record of it
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
