from __future__ import annotations

from collections.abc import Iterator

import pytest

from model_worker.models import LoadedModel
from tests.engines import EngineDriver, running_engine
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def driver(tiny_model: LoadedModel) -> Iterator[EngineDriver]:
    with running_engine(tiny_model) as one:
        yield one
