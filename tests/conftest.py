"""What every test may ask for: ranks that are kept alive (see `tests.pool`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(3).run(function, *args)` calls `function(world, *args)` on each of three ranks."""
    pools = Pools()
    yield pools
    pools.close()
