"""Signs that an output cannot show are replaced by plain ones."""

from __future__ import annotations

import pytest

from shoal.base.signs import PLAIN, as_far_as, plain

pytestmark = pytest.mark.oldest


def test_signs_keep_their_meaning_in_ascii() -> None:
    assert plain("a … b → c × 4, ≤ 3 – “é”") == 'a ... b -> c x 4, <= 3 - "?"'
    assert plain("┌─┐\n│…│") == "+-+\n|...|"
    assert plain("日") == "?"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8", "utf-16"])
def test_every_text_can_be_written(encoding: str) -> None:
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    shown = text.encode(encoding, PLAIN).decode(encoding)
    assert as_far_as(encoding, text) == shown
    assert (shown == text) == encoding.startswith("utf")
    assert as_far_as(None, "…") == "…"


def test_signs_that_the_encoding_has_stay() -> None:
    assert as_far_as("cp1252", "… → ×") == "… -> ×"
