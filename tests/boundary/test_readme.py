"""`README.md` names tests that exist, and has every fault of the collection."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text()

FAULTS = """
A1 A3 A4 A5 A6 A7 A8 A9
B1 B2 B3 B5 B6 B7 B8 B9
C1 C2 C3 C5 C6 C7 C8
D1 D2 D3 D4 D5 D6 D7 D9 D10 D11 D12
E1 E2 E3 E5 E6
F1 F2 F3 F4 F5 F6 F8 F9 F10
G1 G3 G5 G6 G7
H2 H3
I1 I2 I4 I6 I7 I8
J1 J2 J4 J5 J6
K1 K2 K3 K5
L2 L3 L4
M1 M2 M3
N1 N3 N4
"""


def test_every_test_named_in_the_table_exists():
    tests = {
        path.stem.removeprefix("test_"): {
            node.name.removeprefix("test_")
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        for path in HERE.rglob("test_*.py")
    }
    named = re.findall(r"`([a-z_]+)\.([a-z_0-9.]+)(?:\[[\w-]+\])?`", README)
    assert len(named) > 150
    for module, name in named:
        assert name in tests.get(module, ()), f"{module}.{name}"


def test_every_fault_of_the_collection_has_its_line():
    """Each once, and with a test that is named or a reason."""
    _, table = README.split("## Faults seen elsewhere")
    rows = re.findall(r"^\| ((?:[A-N]\d+(?:, )?)+) [^|]*\|([^|]*)\|$", table, re.MULTILINE)
    listed = [fault for faults, _ in rows for fault in faults.split(", ")]
    assert sorted(listed) == sorted(FAULTS.split())
    for faults, answer in rows:
        assert "n/a: " in answer or re.search(r"`[a-z_]+\.[a-z_0-9]+", answer), faults
