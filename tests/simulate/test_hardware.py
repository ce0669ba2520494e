"""A worker by data sheet and config: an 8B model on an H100 is what is measured of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.errors import InvalidValueError
from kvist.simulate.hardware import ACCELERATORS, machine_of, memory_of
from kvist.simulate.memory import Memory
from kvist.simulate.worker import Machine

LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def model(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return folder


def test_an_8b_model_on_an_h100_is_the_default(tmp_path: Path) -> None:
    guessed, default = machine_of("h100", model(tmp_path)), Machine()
    for name in Machine.__slots__:
        assert getattr(guessed, name) == pytest.approx(getattr(default, name), rel=0.35), name


def test_several_are_one_worker_with_more_room(tmp_path: Path) -> None:
    one, four = (machine_of(name, model(tmp_path)) for name in ("h100", "h100x4"))
    assert four.prefill_s == pytest.approx(one.prefill_s / 4)
    assert four.cache_tokens > 4 * one.cache_tokens


@pytest.mark.parametrize("name", ACCELERATORS)
def test_each_runs_an_8b_model(name: str, tmp_path: Path) -> None:
    assert machine_of(name, model(tmp_path)).cache_tokens > 20_000


@pytest.mark.parametrize("name", ["", "h1000", "h100x0", "H100", "h100x"])
def test_unknown_ones_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"--accelerator: got .*, expected one of a100, h100"):
        machine_of(name, model(tmp_path))


def test_models_that_do_not_fit_or_do_not_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"expected room for 133 GB of weights"):
        machine_of("h100", model(tmp_path, num_hidden_layers=300))
    with pytest.raises(InvalidValueError, match=r"says how large its layers are"):
        machine_of("h100", model(tmp_path, hidden_size=None))
    with pytest.raises(InvalidValueError, match=r"a folder with a config\.json"):
        machine_of("h100", tmp_path / "nothing")


def test_windows_are_those_of_the_config(tmp_path: Path) -> None:
    assert memory_of(model(tmp_path)) == Memory()
    layers = [*["sliding_attention"] * 3, "full_attention"] * 8
    assert memory_of(model(tmp_path, layer_types=layers, sliding_window=512)) == Memory(512, 0.75)
