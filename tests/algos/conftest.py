"""One torch thread, the default of the engines: small networks are slow on many threads, mainly on a busy machine."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
