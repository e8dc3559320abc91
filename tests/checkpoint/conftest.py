"""A bucket to save to, where the server program for it is installed."""

import uuid

import gcs_server
import pytest


@pytest.fixture(scope="session")
def gcs():
    """The proxy before a GCS server; this process's gs:// paths go there until it ends."""
    lacking = gcs_server.missing()
    if lacking:
        pytest.skip(f"{lacking} is not installed: pip install 'jaxtrain[gcs,test]'")
    with gcs_server.serving() as (proxy, environment):
        gcs_server.use(environment)
        yield proxy


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path):
    """A directory for checkpoints that does not exist yet, on a disk and in a bucket."""
    if request.param == "disk":
        return str(tmp_path / "checkpoints")
    request.getfixturevalue("gcs")
    return f"gs://{gcs_server.BUCKET}/{uuid.uuid4().hex}/checkpoints"
