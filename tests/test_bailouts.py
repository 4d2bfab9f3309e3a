"""Optimizations that raise leave the CPU's numbers and a note."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

import torchtpu
from torchtpu import config, metrics, startup
from torchtpu.compile import graphs
from torchtpu.runtime import _C, engine
from torchtpu.runtime.compile import plan_cache, variants
from torchtpu.runtime.lowering import emit
from torchtpu.runtime.padding import arrays
from torchtpu.runtime.partition.clusters import Clusters
from torchtpu.runtime.partition.split import split
from torchtpu.runtime.telemetry.bailouts import Bailouts


def fails(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


def fails_later(*args: Any, **kwargs: Any) -> Future[Any]:
    made: Future[Any] = Future()
    made.set_exception(ZeroDivisionError("planted"))
    return made


def check(run: Callable[[str], list[Tensor]], what: str) -> None:
    """The program computes what the CPU computes, and what failed is noted."""
    torch.testing.assert_close(run("tpu"), run("cpu"), rtol=1e-5, atol=1e-5)
    last = startup.engine_counters().bailouts.last
    assert {(b.what, b.cause) for b in last} == {(what, "ZeroDivisionError: planted")}
    assert metrics.snapshot()["bailouts"] == {f"{what}: ZeroDivisionError": len(last)}


def lengthening(device: str) -> list[Tensor]:
    return [(torch.ones(n, 3, device=device) * 0.5).exp().sum(0).cpu() for n in range(11, 17)]


def once(device: str) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12, device=device).reshape(3, 4)
    return [((x @ x.t()).tanh() * 2 + x.sum()).cpu()]


@pytest.fixture
def all_anew() -> None:
    """What follows is planned again, from what is on disk."""
    _C.forget_streams()
    startup.engine()._variants.stock._visits.clear()
    kept = startup.engine().fragments
    kept._known, kept._older = {}, {}


@pytest.mark.usefixtures("all_anew")
def test_a_rule_that_raises_leaves_sizes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.engine()._layouts, "pad", fails)
    for mine, theirs in zip(lengthening("tpu"), lengthening("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert any("planted" in cause for cause in metrics.snapshot()["regions_not_padded"])


@pytest.mark.bailouts("padding")
@pytest.mark.usefixtures("all_anew")
@pytest.mark.parametrize("way", [fails, fails_later])
def test_what_has_no_program_with_room_has_an_exact_one(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Engine, "_with_padding", way)
    check(lengthening, "padding")


@pytest.mark.bailouts("padding")
@pytest.mark.usefixtures("all_anew")
def test_what_cannot_be_launched_with_room_is_launched_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays.PaddedWork, "inputs", fails)
    monkeypatch.setattr(arrays.PaddedArray, "exist", True)  # as where something was padded before
    check(lengthening, "padding")


@pytest.mark.bailouts("fitting")
def test_a_region_that_is_not_fitted_into_memory_is_launched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.engine()._executor._fitting, "fit", fails)
    run = lambda device: [(torch.ones(1 << 18, device=device) * 0.25).exp().sqrt().cpu()]
    with config.using(memory_limit=1 << 20):
        check(run, "fitting")


@pytest.mark.bailouts("clusters")
@pytest.mark.usefixtures("all_anew")
def test_a_region_whose_search_for_clusters_raises_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "may_have_clusters", lambda *args: True)
    monkeypatch.setattr(plan_cache, "search", fails)
    check(lambda device: [t - 1 for t in once(device)], "clusters")


@pytest.mark.bailouts("clusters")
@pytest.mark.usefixtures("all_anew")
def test_a_region_whose_clusters_are_not_compiled_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    start = variants.RegionVariants.start
    monkeypatch.setattr(engine.Engine, "_clusters", lambda self, p: Clusters(split(p, [2]), sys.maxsize))
    monkeypatch.setattr(variants.RegionVariants, "start", lambda self: fails_later() if self._clusters else start(self))
    check(once, "clusters")


@pytest.mark.bailouts("boundaries", "constants", "lists", "repetitions")
@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("boundaries", "find_boundaries"),
        ("constants", "folded"),
        ("lists", "take_apart"),
        ("repetitions", "repeated"),
    ],
)
def test_a_text_is_written_without_what_raises(what: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, function, fails)
    functions = {"boundaries": torch.exp, "constants": torch.sin, "lists": torch.cos, "repetitions": torch.tanh}
    shape = 3 + len(what), 7  # no program is on disk
    check(lambda device: [functions[what](torch.ones(shape, device=device)).cpu()], what)


@pytest.mark.bailouts("variants")
@pytest.mark.usefixtures("all_anew")
@pytest.mark.parametrize("name", ["_recalled", "is_due"])
def test_a_region_stays_in_its_usual_form_where_choosing_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants.RegionVariants, name, fails)
    check(lambda device: [t for _ in range(4) for t in once(device)], "variants")
    assert len(startup.engine_counters().bailouts.last) == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.bailouts("replay")
def test_a_compiled_graph_that_is_not_readied_runs_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Builder", fails)
    function = torch.compile(lambda x: x.sin().sum(0) * 2, dynamic=False)
    run = lambda device: [
        (function(x.to(device)) if device == "tpu" else x.sin().sum(0) * 2).cpu() for x in [torch.ones(3)]
    ]
    check(run, "replay")


def test_an_error_of_the_program_itself_is_raised_as_it_is_and_is_no_bailout() -> None:
    for n in range(3, 9):
        x = torch.ones(n, 4, device="tpu")
        with pytest.raises(IndexError, match="out of range"):
            torch.nn.functional.embedding(torch.tensor([n, 99], device="tpu"), x).cpu()
    assert metrics.snapshot()["bailouts"] == {}


@pytest.mark.bailouts("boundaries")
def test_explain_and_the_log_name_the_line_and_the_cause(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emit, "find_boundaries", fails)
    with torchtpu.explain() as explanation, config.using(log="cluster"):
        torch.ones(5, 5, device="tpu").exp().cpu()
    (row,) = explanation.data["bailouts"]
    assert row["optimisation"] == "boundaries"
    assert row["cause"] == "ZeroDivisionError: planted"
    assert __file__.rpartition("/")[2] in row["line"]
    assert "ZeroDivisionError: planted" in str(explanation)
    assert "Optimisations that failed" in explanation.html()
    assert "ZeroDivisionError: planted" in capfd.readouterr().err


def test_the_last_bailouts_are_kept_and_all_are_counted() -> None:
    bailouts = Bailouts()
    for i in range(300):
        with bailouts.attempt("boundaries", f"a.py:{i}"):
            fails()
    assert bailouts.counts() == {"boundaries: ZeroDivisionError": 300}
    assert [b.line for b in bailouts.last] == [f"a.py:{i}" for i in range(200, 300)]
    with pytest.raises(KeyboardInterrupt), bailouts.attempt("boundaries", "a.py:1"):
        raise KeyboardInterrupt
