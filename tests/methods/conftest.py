import pytest

from tests.train.tiny_run import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
