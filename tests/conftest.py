"""What every test may ask for: ranks that are kept alive (see `tests.pool`), and scripts that run meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beside import pytest_collection_finish, pytest_collection_modifyitems, pytest_sessionfinish
from tests.pool import Pools

__all__ = ["pools", "pytest_collection_finish", "pytest_collection_modifyitems", "pytest_sessionfinish"]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(3).run(function, *args)` calls `function(world, *args)` on each of three ranks."""
    pools = Pools()
    yield pools
    pools.close()
