"""One torch thread, as engines set it by default: tiny nets on many threads are slow, and slower on a busy machine."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
