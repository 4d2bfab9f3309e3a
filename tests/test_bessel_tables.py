"""In: the definitions of Bessel and Airy functions. Out: the coefficients that their lowerings have."""

from __future__ import annotations

import bessel_tables
import pytest

from torchtpu.ops.special import bessel


@pytest.mark.parametrize("name", bessel_tables.TABLES)
def test_a_table_is_what_its_generator_makes(name: str) -> None:
    assert getattr(bessel, name) == bessel_tables.table(name)


def test_every_table_has_a_generator() -> None:
    tables = {name for name, value in vars(bessel).items() if isinstance(value, tuple) and name.isupper()}
    assert tables == {*bessel_tables.TABLES}
