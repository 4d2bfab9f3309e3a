"""StableHLO that lowerings write without jax: see `write` of `torchtpu.ops.registry.lowering`."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]
Kind = tuple[Shape, str]  # and the element type, as StableHLO calls it


def type_of(shape: Shape, element: str) -> str:
    """The type of an array."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def _zero(element: str) -> tuple[str, str]:
    """The first name of a constant, and a 0."""
    if element.startswith("complex"):
        return "%cst", "(0.000000e+00,0.000000e+00)"
    if element.startswith(("f", "bf")):
        return "%cst", "0.000000e+00"
    return "%c", "false" if element == "i1" else "0"


def padded(given: Kind, made: Shape, edges: Sequence[tuple[int, int, int]]) -> list[str]:
    """What puts zeros before, behind and between the elements of the only array."""
    shape, element = given
    name, zero = _zero(element)
    low, high, interior = (list(each) for each in zip(*edges, strict=True))
    scalar = type_of((), element)
    types = f"({type_of(shape, element)}, {scalar}) -> {type_of(made, element)}"
    return [
        f"{name} = stablehlo.constant dense<{zero}> : {scalar}",
        f"%0 = stablehlo.pad %arg0, {name}, low = {low}, high = {high}, interior = {interior} : {types}",
    ]


def placed(given: Kind, made: Kind, dim: int, first: str, *, is_row: bool) -> list[str]:
    """What puts the only array among zeros from `first` on, which counts from the end where it is negative. The array
    has the dimension `dim`, or is one row of it."""
    (shape, element), number, lines = given, 0, []
    array, index = "%arg0", type_of((), "i64")
    if is_row:
        spread = *shape[:dim], 1, *shape[dim:]
        dims = [axis for axis in range(len(spread)) if axis != dim]
        types = f"({type_of(shape, element)}) -> {type_of(spread, element)}"
        lines = [f"%0 = stablehlo.broadcast_in_dim %arg0, dims = {dims} : {types}"]
        shape, array, number = spread, "%0", 1
    name, zero = _zero(element)
    among, scalar, rank = type_of(*made), type_of((), element), len(shape)
    constants = (f"%c_{count}" if count >= 0 else "%c" for count in range(-1, rank + 2))
    before, size = next(constants), next(constants)
    lines += [
        f"{before} = stablehlo.constant dense<0> : {index}",
        f"%{number} = stablehlo.compare LT, {first}, {before}, SIGNED : ({index}, {index}) -> {type_of((), 'i1')}",
        f"{size} = stablehlo.constant dense<{made[0][dim]}> : {index}",
        f"%{number + 1} = stablehlo.add {first}, {size} : {index}",
        f"%{number + 2} = stablehlo.select %{number}, %{number + 1}, {first} : {type_of((), 'i1')}, {index}",
    ]
    name = next(constants) if name == "%c" else name
    lines += [
        f"{name} = stablehlo.constant dense<{zero}> : {scalar}",
        f"%{number + 3} = stablehlo.broadcast_in_dim {name}, dims = [] : ({scalar}) -> {among}",
    ]
    starts = [f"%{number + 2}" if axis == dim else next(constants) for axis in range(rank)]
    lines += [f"{start} = stablehlo.constant dense<0> : {index}" for axis, start in enumerate(starts) if axis != dim]
    types = f"({', '.join([among, type_of(shape, element), *[index] * rank])}) -> {among}"
    given_all = ", ".join([f"%{number + 3}", array, *starts])
    return [*lines, f"%{number + 4} = stablehlo.dynamic_update_slice {given_all} : {types}"]
