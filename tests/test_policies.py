"""What is compiled under the policies block and frozen, ready() and deterministic mode, and that bits are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script import Ended, run_script

from torchtpu.runtime.ir.manifest import write_lines


def passed(ended: Ended) -> list[str]:
    assert ended.status == 0, ended.err
    return ended.out.splitlines()


FROZEN = """
    import torch, torchtpu
    from torchtpu import config, metrics

    def score(x, last):
        for _ in range(3):
            x = (x * 0.5).sin() + 1
        return last(x)

    def compiled():
        torch.tpu.synchronize()
        return metrics.snapshot()["programs_compiled"]

    x = torch.ones(3, device="tpu")
    x.tolist()
    expected = score(x, torch.tanh).tolist()
    middle = score(x, torch.Tensor.sum)
    middle.item()
    (x * 2).tolist()
    before = compiled()
    with config.using(policy="frozen"):
        assert score(x, torch.tanh).tolist() == expected
        joined = score(x, torch.tanh) * 2  # one stream that is two known regions
        assert joined.tolist() == [2 * e for e in expected]
        try:
            score(x, torch.cos).tolist()
        except RuntimeError as error:
            print(error)
        assert score(x, torch.tanh).tolist() == expected
    assert compiled() == before
    assert len(score(x, torch.cos).tolist()) == 3
    assert compiled() == before + 1
"""


def test_frozen_runs_what_exists_and_names_what_does_not() -> None:
    (error,) = passed(run_script(FROZEN, TORCHTPU_CACHE="off"))
    for part in ("10 ops", "not compiled", "frozen", "where this one has cos (", ".py:9"):
        assert part in error, error


SERVING = """
    import torch, torchtpu
    from torchtpu import config, metrics

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to("tpu").eval()

    @torch.inference_mode()
    def serve(size, length):
        return model(torch.ones(size, length, 8, device="tpu")).softmax(-1).argmax(-1).tolist()

    SHAPES = [(size, length) for size in (1, 2, 5) for length in (3, 8)]
"""
WARMED = SERVING + "    print([serve(*shape) for shape in SHAPES])\n"
SERVED = (
    SERVING
    + """
    import os, random
    config.set(policy="frozen")
    print(torchtpu.ready(os.environ["MANIFEST"]) > 0)
    ready = metrics.snapshot()
    for size, length in random.Random(0).choices([*SHAPES, (3, 3)], k=int(os.environ["REQUESTS"])):
        assert [len(row) for row in serve(size, length)] == [length] * size
    now = metrics.snapshot()
    print(now["programs_compiled"], now["cache_hits_disk"] - ready["cache_hits_disk"])
    try:
        serve(300, 3)  # no padded program is that long
    except RuntimeError as error:
        print("frozen" in str(error))
"""
)


@pytest.mark.parametrize("requests", [60, pytest.param(10_000, marks=pytest.mark.full)])
def test_serving_frozen_from_a_manifest_compiles_and_loads_nothing(tmp_path: Path, requests: int) -> None:
    cache, journal, manifest = tmp_path / "cache", tmp_path / "journal", tmp_path / "programs.jsonl"
    cache.mkdir()
    journal.mkdir()
    passed(run_script(WARMED, TORCHTPU_CACHE_DIR=str(cache), TORCHTPU_JOURNAL=str(journal)))
    lines = [json.loads(line) for file in journal.iterdir() for line in file.read_text().splitlines()]
    write_lines(manifest, [line for line in lines if "program" in line], {})
    ended = run_script(SERVED, TORCHTPU_CACHE_DIR=str(cache), MANIFEST=str(manifest), REQUESTS=str(requests))
    assert passed(ended) == ["True", "0 0", "True"]


DETERMINISTIC = """
    import gc, os
    if os.environ.get("GC"):
        gc.set_threshold(*map(int, os.environ["GC"].split(",")))
    import torch
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 33), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)
    ).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 12, device="tpu")).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    print([p.sum().item().hex() for p in model.parameters()])
"""


def test_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    runs: list[tuple[str, dict[str, str]]] = [
        ("one", {"TORCHTPU_NUM_COMPILE_THREADS": "1"}),
        ("one", {"TORCHTPU_POLICY": "block"}),  # a warm cache
        ("two", {"TORCHTPU_NUM_COMPILE_THREADS": "3", "GC": "1,1,1"}),
    ]
    seen = []
    for name, environment in runs:
        cache = tmp_path / name
        cache.mkdir(exist_ok=True)
        seen.append(passed(run_script(DETERMINISTIC, TORCHTPU_CACHE_DIR=str(cache), **environment)))
    assert seen[0] == seen[1] == seen[2]
