"""What holds for every test: no network for the model libraries, few threads, and pytest's own log handlers.

The environment is set before any of those libraries is imported, since they read these variables once.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
from collections.abc import Iterator

import pytest

LOGGING = ("hydra.main", "hydra.core.utils", "hydra._internal.hydra", "hydra._internal.core_plugins.basic_launcher")


@pytest.fixture(autouse=True, scope="session")
def keep_log_handlers() -> Iterator[None]:
    """Commands that run in this process set up no logging: Hydra would close the handlers that pytest captures with."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LOGGING:
            patch.setattr(importlib.import_module(name), "configure_log", lambda *args: None)
        yield
