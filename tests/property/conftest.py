from tests.unit.model_worker.conftest import tiny_model

__all__ = ["tiny_model"]
