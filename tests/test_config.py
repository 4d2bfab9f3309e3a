"""Knobs as variables, calls and blocks have typed values, and errors that name the knob."""

from __future__ import annotations

import warnings

import pytest

from torchtpu import config


def test_environment_variable_is_read(monkeypatch):
    monkeypatch.setenv("TORCHTPU_MAX_REGION_BYTES", "1.5G")
    monkeypatch.setenv("TORCHTPU_LOG", "launch, stablehlo")
    assert config.get("max_region_bytes") == 3 << 29
    assert config.get("log") == ("launch", "stablehlo")


def test_code_wins_over_the_environment_and_a_block_restores(monkeypatch):
    monkeypatch.setenv("TORCHTPU_FALLBACK", "silent")
    with config.using(fallback="error"):
        assert config.fallback == "error"
        with config.using(fallback="warn"):
            assert config.fallback == "warn"
        assert config.fallback == "error"
    assert config.fallback == "silent"


def test_a_wrong_value_names_the_variable_and_what_it_takes(monkeypatch):
    monkeypatch.setenv("TORCHTPU_FALLBACK", "maybe")
    with pytest.raises(ValueError, match="TORCHTPU_FALLBACK='maybe': expected one of warn, error, silent"):
        config.get("fallback")
    with pytest.raises(ValueError, match="max_in_flight=-1: expected a whole number"):
        config.set(max_in_flight=-1)


def test_an_unknown_knob_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"no knob 'fall_back'\. Did you mean 'fallback'"):
        config.set(fall_back="warn")


def test_an_unknown_variable_warns_with_a_suggestion():
    with pytest.warns(UserWarning, match="TORCHTPU_SINC is not a knob of torchtpu. Did you mean TORCHTPU_SYNC"):
        config.warn_unknown({"TORCHTPU_SINC": "1", "HOME": "/"})


def test_known_variables_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.warn_unknown({knob.variable: "" for knob in config.KNOBS.values()})


def test_listeners_hear_blocks_begin_and_end():
    heard = []
    config.on_change(lambda name, value: heard.append((name, value)) if name == "sync" else None)
    with config.using(sync=True):
        pass
    assert [value for _, value in heard] == [False, True, False]


def test_the_table_lists_every_knob_with_its_default():
    text = config.table()
    assert all(knob.variable in text for knob in config.KNOBS.values())
    assert "| `TORCHTPU_MAX_REGION_BYTES` | `128G` |" in text
