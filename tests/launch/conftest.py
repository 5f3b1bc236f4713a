import pytest

from tests.launch import slurm_cluster
from tests.train.tiny_run import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def slurm():
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    with slurm_cluster.cluster() as cluster:
        yield cluster
