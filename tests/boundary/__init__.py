"""The decoders of `examples/boundary` are what most tests here run; ranks import them through this package too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "boundary"))
