"""The plain engine against transformers: the tiny checkpoints mean the same to both."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm import LLM, SamplingParams

from tests.runtimes.vllm.checkpoints import KINDS, tiny
from tests.runtimes.vllm.engines import plain

pytestmark = pytest.mark.vllm

PROMPT = [5, 17, 3, 99, 42, 149, 8, 60, 120]
NEW = 6


def by_transformers(kind: str) -> tuple[torch.Tensor, list[int]]:
    """The log-probabilities of every token after each of the prompt's but the last, and the greedy continuation."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tiny(kind), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(PROMPT)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        for _ in range(NEW):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return logprobs, tokens[len(PROMPT) :]


def by_engine(llm: LLM) -> tuple[torch.Tensor, list[int]]:
    """The same, of the engine."""
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=-1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = [row for row in output.prompt_logprobs if row is not None]
    logprobs = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
    return logprobs, list(output.outputs[0].token_ids)


def check(kind: str, llm: LLM) -> None:
    logprobs, tokens = by_transformers(kind)
    ours, our_tokens = by_engine(llm)
    torch.testing.assert_close(ours, logprobs, rtol=0, atol=1e-4)
    assert our_tokens == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_gives_what_transformers_gives(kind: str) -> None:
    with plain(kind) as llm:
        check(kind, llm)


def test_pipeline_stages_give_what_transformers_gives() -> None:
    with plain("llama", tp=2, pp=2) as llm:
        check("llama", llm)


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek", "gpt-oss"])
def test_expert_parallel_ranks_give_what_transformers_gives(kind: str) -> None:
    with plain(kind, tp=2, enable_expert_parallel=True) as llm:
        check(kind, llm)
