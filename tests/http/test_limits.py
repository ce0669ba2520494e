"""A limit that bounds nothing is refused where it is set."""

from dataclasses import fields

import pytest

from kvist.errors import InvalidValueError
from kvist.http import HttpLimits, UpstreamLimits

ALL = [(kind, field.name) for kind in (HttpLimits, UpstreamLimits) for field in fields(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_of_zero_or_less_is_refused_by_name(
    kind: type[HttpLimits] | type[UpstreamLimits], name: str, value: float
) -> None:
    with pytest.raises(InvalidValueError, match=name):
        kind(**{name: value})  # type: ignore[arg-type]
