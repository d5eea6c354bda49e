from tests.unit.model_worker.conftest import driver, tiny_model

__all__ = ["driver", "tiny_model"]
