"""The places of the mutation study match the product."""

import pytest

from tests.studies.mutation import Place, load_places
from tests.support.paths import ROOT


@pytest.mark.parametrize("place", load_places(), ids=lambda place: place.name)
def test_place_occurs_once(place: Place) -> None:
    assert (ROOT / place.path).read_text().count(place.old) == 1
    assert place.old != place.new
