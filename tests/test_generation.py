"""transformers' text generation with a StaticCache gives the CPU's tokens, in a bounded number of programs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtpu import metrics

transformers = pytest.importorskip("transformers")

PROMPT, TOKENS = 7, 14


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


def tokens(device: str) -> Tensor:
    return torch.arange(1, PROMPT + 1).to(device)[None]


@torch.no_grad()
def decode(model: Any, device: str) -> tuple[list[int], list[int]]:
    """A loop of one's own, whose tensors keep their sizes: the tokens, and how many programs each turn compiled."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    token = model(tokens(device), cache=cache).logits[:, -1:].argmax(-1)
    place = torch.full((1, 1), PROMPT, device=device)
    made, compiled = [int(token)], []
    for _ in range(TOKENS - 1):
        metrics.reset()
        token = model(token, cache=cache, position_ids=place).logits[:, -1:].argmax(-1)
        place = place + 1
        made.append(int(token))
        torch.tpu.synchronize()
        compiled.append(metrics.snapshot()["programs_compiled"])
    return made, compiled


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_decoding_loop_with_a_static_cache_compiles_nothing_after_two_tokens(is_compiled: bool) -> None:
    model = llama()
    expected, _ = decode(model, "cpu")
    model.to("tpu")
    if is_compiled:
        model.forward = torch.compile(model.forward)
    made, compiled = decode(model, "tpu")
    assert made == expected
    assert sum(compiled[:2]) > 0
    assert sum(compiled[2:]) == 0


def test_generate_with_a_static_cache_compiles_a_few_small_programs_for_all_lengths(in_one_tier: None) -> None:
    """Its tokens, positions and masks grow by `torch.cat`; the model that gets the last of each is compiled once."""
    counts: list[int] = []

    class Count(transformers.StoppingCriteria):
        def __call__(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            torch.tpu.synchronize()
            counts.append(metrics.snapshot()["programs_compiled"])
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def generate(model: Any, device: str) -> list[int]:
        made = model.generate(
            tokens(device), attention_mask=torch.ones_like(tokens(device)), max_new_tokens=TOKENS, do_sample=False,
            cache_implementation="static", disable_compile=True, pad_token_id=0, eos_token_id=None,
            stopping_criteria=[Count()],
        )  # fmt: skip
        answer: list[int] = made[0].tolist()
        return answer

    model = llama()
    expected = generate(model, "cpu")
    counts.clear()
    model.to("tpu")
    assert generate(model, "tpu") == expected
    later = [after - before for before, after in pairwise(counts[4:])]
    assert len(later) == TOKENS - 5
    assert sum(later) <= 6
    torch.tpu.synchronize()
    metrics.reset()
    assert generate(model, "tpu") == expected
    assert metrics.snapshot()["programs_compiled"] == 0
