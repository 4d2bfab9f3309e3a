"""Asserts on values: an array that has to be nonzero, and a check that fails the program's reads otherwise."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import composed, lowering


@lowering("_assert_async")
def assert_async(x, *, ctx):
    ctx.check(x != 0, "Expected Tensor with single nonzero value, but got zero", RuntimeError)
    return ()


@lowering("_assert_async.msg")
def assert_async_message(x, assert_msg, *, ctx):
    ctx.check(x != 0, assert_msg, RuntimeError)
    return ()


@lowering("_functional_assert_async.msg")
def functional_assert_async(x, assert_msg, dep_token, *, ctx):
    ctx.check(x != 0, assert_msg, RuntimeError)
    return dep_token


@composed("_make_dep_token")
def make_dep_token(**options: Any) -> torch.Tensor:
    return torch.empty((), **options)
