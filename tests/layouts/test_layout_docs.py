from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hf_stream.layouts

MODULES = sorted(info.name for info in pkgutil.iter_modules(hf_stream.layouts.__path__))


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_are_true(module: str) -> None:
    loaded = importlib.import_module(f"hf_stream.layouts.{module}")
    results = doctest.testmod(
        loaded, extraglobs=vars(hf_stream.layouts), optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF
    )
    assert results.failed == 0


def test_the_public_names_are_sorted_and_exist() -> None:
    names = hf_stream.layouts.__all__
    assert names == sorted(names)
    assert all(hasattr(hf_stream.layouts, name) for name in names)
