"""One template for all tests of a session; a fresh job directory and data set for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_harness import Cluster, template_process, write_dataset

from myriad.spec.messages import FromTemplate
from myriad.storage.memory.channel import Channel


@pytest.fixture(scope="session")
def template() -> Iterator[Channel[FromTemplate]]:
    with template_process() as (channel, _):
        yield channel


@pytest.fixture
def cluster(template: Channel[FromTemplate], tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(template, tmp_path / "job")
    yield made
    made.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data" / "random")
