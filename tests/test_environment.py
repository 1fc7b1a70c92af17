"""Environment variables, in both spellings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.base.logs import setting, switch

pytestmark = pytest.mark.oldest


def test_the_own_spelling_comes_first_and_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting("TEST_VALUE") == ""
    assert setting("TEST_VALUE", "default") == "default"
    monkeypatch.setenv("HIVEMIND_TEST_VALUE", "theirs")
    assert setting("TEST_VALUE", "default") == "theirs"
    monkeypatch.setenv("SHOAL_TEST_VALUE", "ours")
    assert setting("TEST_VALUE", "default") == "ours"
    monkeypatch.setenv("SHOAL_TEST_VALUE", "")
    assert setting("TEST_VALUE", "default") == "theirs"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("False", False), ("0", False), ("", True)])
def test_switches(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("SHOAL_TEST_SWITCH", text)
    assert switch("TEST_SWITCH", default=True) is value
    monkeypatch.setenv("SHOAL_TEST_SWITCH", "perhaps")
    with pytest.raises(ValueError, match="SHOAL_TEST_SWITCH must be true or false, got 'perhaps'"):
        switch("TEST_SWITCH", default=True)


@pytest.mark.parametrize("prefix", ["SHOAL", "HIVEMIND"])
def test_number_of_search_workers(prefix: str) -> None:
    script = """
        import inspect
        from shoal.dht import DEFAULT_NUM_WORKERS, DHT, DHTNode
        for function in (DHT, DHTNode.create):
            assert inspect.signature(function).parameters["num_workers"].default == DEFAULT_NUM_WORKERS == 7
    """
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_DHT_NUM_WORKERS")}
    subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        env={**environment, f"{prefix}_DHT_NUM_WORKERS": "7"},
        check=True,
        timeout=60,
    )
